"""Directories of model files: what comes from elsewhere is checked, what is written is whole."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer_jax.config import ConfigError


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to write into, which takes the name `target` when everything is in it.

    On any error nothing is left.

    Raises:
        ConfigError: `target` exists and is not an empty directory, or cannot be written.
    """
    target = Path(target).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output: got {target}, allowed: a new or an empty directory")
    missing = [path for path in target.parents if not path.exists()]
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException as error:
        if partial:
            shutil.rmtree(partial, ignore_errors=True)
        for path in missing:  # the innermost first; one that somebody else uses stays
            with contextlib.suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            why = error.strerror or error
            raise ConfigError(f"--output: {target}: cannot be written: {why}") from None
        raise


def read_file(path: Path) -> bytes:
    """The content of a file that must be there."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such file, but the format has it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    """A JSON object without repeated keys; {} where an optional file is missing."""
    if optional and not path.exists():
        return {}
    return parse_json(read_file(path), str(path))


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes.

    Raises:
        ConfigError: not JSON, not an object, or a key that comes twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"{where}: got {twice!r} twice, allowed: once")
        return found

    try:
        tree = json.loads(content, object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: got {type(tree).__name__}, allowed: an object")
    return tree


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """An object, indented, UTF-8."""
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
