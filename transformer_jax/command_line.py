"""The typed command line: a config file, then --section.field VALUE for any field of Config."""

import argparse
import contextlib
import importlib.util
import inspect
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, cast

import tyro

from transformer_jax.config import Config, ConfigError, check

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_BOX = re.compile("[╭╮╰╯│─]+")


class Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are ConfigErrors: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse with what is wrong."""
        raise ConfigError(message)


def load_config_file(spec: str) -> Config:
    """The Config that a file's get_config() returns; "FILE:ARG" calls get_config("ARG")."""
    name, _, argument = spec.partition(":")
    path = Path(name)
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(f"--config: got {name!r}, allowed: a file such as configs/quickstart.py")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"--config: {error.filename}:{error.lineno}: {error.msg}") from None
    except ImportError as error:
        raise ConfigError(f"--config: {name}: {error}") from None
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config: {name}: has no function get_config")
    arguments = [argument] if argument else []
    try:
        inspect.signature(module.get_config).bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"--config: got {spec!r}, but for get_config of {name}: {error}"
        ) from None
    return module.get_config(*arguments)


def override(config: Config, arguments: Sequence[str], program: str, description: str) -> Config:
    """The config with the fields that the command line names changed, and checked.

    Raises:
        ConfigError: an unknown field, a wrong type or an impossible value, in one line.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(
                Config,
                prog=program,
                description=description,
                args=list(arguments),
                default=config,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(complaint.getvalue())) from None
    return check(parsed)


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Call main with the arguments; a user's mistake is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # UTF-8 whatever the locale
        cast(io.TextIOWrapper, stream).reconfigure(encoding="utf-8", errors="backslashreplace")
    with _Stop() as stop:
        try:
            code = main(sys.argv[1:])
        except BaseException as error:
            # A library may have made another error of a stop that came amid its own work.
            code = 128 + stop.number if stop.number else _exit_code(error)
    sys.exit(code or 0)


def use_huge_pages() -> None:
    """Start this process anew with huge pages, where Linux gives them only to those who ask.

    A step on a CPU takes gigabytes from the system and gives them back; in pages of 4 KiB that is
    a tenth of its time. glibc asks for huge ones if it is told to before it starts. GLIBC_TUNABLES
    in the environment, empty or not, comes first.
    """
    try:
        who = _HUGE_PAGES.read_text("ascii")
    except OSError:  # no Linux, or one without them
        return
    if "[madvise]" in who and "GLIBC_TUNABLES" not in os.environ and sys.executable:
        os.environ |= HUGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _exit_code(error: BaseException) -> int:
    """The user's and the machine's errors are told in one line; any other is raised."""
    match error:
        case ConfigError():
            print(f"error: {error}", file=sys.stderr)
            return 2
        case BrokenPipeError():  # the reader of our output has gone
            sys.stderr.close()
            return 0
        case FloatingPointError() | MemoryError() | OSError():
            # Training, a model, a device or a disk went wrong, and says so in words.
            print(f"error: {error}", file=sys.stderr)
            return 1
    raise error


class _Stop:
    """SIGTERM and Ctrl-C unwind the command, so that files are closed after a whole line.

    Training has handlers of its own while there is something to save.

    Attributes:
        number: of the first signal; 0 so far.
    """

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "_Stop":
        self._handlers = {
            number: signal.signal(number, self._unwind)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
        }
        self._hook, sys.unraisablehook = sys.unraisablehook, self._retry
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a retry that nothing waits for any more
        sys.unraisablehook = self._hook
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _unwind(self, number: int, _: FrameType | None) -> NoReturn:
        self.number = self.number or number
        raise SystemExit(128 + self.number)

    def _retry(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised while it collects garbage, in which JAX takes part: unwind a
        moment later."""
        if issubclass(dropped.exc_type, SystemExit) and self.number:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
        else:
            self._hook(dropped)


def _one_line(box: str) -> str:
    """tyro's framed message without the frame and without the help it repeats."""
    lines = [_BOX.sub("", line).strip() for line in box.splitlines()]
    lines = [line for line in lines if line]
    end = next((i for i, line in enumerate(lines) if line.startswith("For full help")), len(lines))
    return re.sub(r"\s+", " ", " ".join(lines[1:end]))
