"""Many lines, many files: through a function of texts in bounded memory, outputs whole."""

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import rich.console
import rich.progress

from transformer_jax.config import ConfigError
from transformer_jax.data.files import COMPRESSED, expand, read_lines

# Lines taken at a time: enough to sort by length, few enough to hold.
CHUNK_LINES = 2048

# Texts and the number of the first, counted from 1 -> an output line for each.
Translate = Callable[[list[str], int], Iterable[str]]


class Job(NamedTuple):
    """One file in, one file out."""

    input: str
    output: Path


def stream(lines: Iterable[str], out: TextIO, translate: Translate, title: str = "") -> None:
    """Write one line for each line, in order; whole lines only, also when interrupted.

    Args:
        lines: without their line ends, any number.
        out: where to.
        translate: called with at most CHUNK_LINES lines.
        title: what the progress bar on stderr is called.
    """
    with _progress(title) as advance:
        first = 1
        for chunk in chunks(lines):
            for line in translate(chunk, first):
                out.write(line + "\n")
            out.flush()
            first += len(chunk)
            advance(len(chunk))


def chunks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Lists of up to CHUNK_LINES lines."""
    lines = iter(lines)
    while chunk := list(itertools.islice(lines, CHUNK_LINES)):
        yield chunk


def find_jobs(inputs: Sequence[str], output_dir: str | Path, share: str = "0/1") -> list[Job]:
    """The files that are still to be done, each with its output in a directory.

    Args:
        inputs: names or patterns such as "parts/*.en.gz".
        output_dir: the output of parts/7.en.gz is output_dir/7.en; it is made if need be.
        share: "I/N": of N processes with the same inputs, this one takes every Nth file, from I.

    Raises:
        ConfigError: no such file, two of the same name, or a share that is none.
    """
    index, _, count = share.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ConfigError(f"--share: got {share!r}, allowed: I/N with I from 0 to N - 1")
    names = sorted({name for pattern in inputs for name in expand(pattern, "--input")})
    for name in names:
        if not Path(name).is_file():
            raise ConfigError(f"--input: got {name!r}, allowed: files and patterns of files")
    outputs: dict[Path, str] = {}
    for name in names:
        path = Path(name)
        output = Path(output_dir) / (path.stem if path.suffix in COMPRESSED else path.name)
        if output in outputs:
            raise ConfigError(
                f"--input: got {outputs[output]} and {name}, allowed: files of different names, "
                f"since both would be written to {output}"
            )
        if output.exists() and output.samefile(path):
            raise ConfigError(f"--output-dir: got {output_dir}, allowed: not that of the inputs")
        outputs[output] = name
    jobs = [Job(name, output) for output, name in outputs.items()]
    return [job for job in jobs[int(index) :: int(count)] if not job.output.exists()]


def run_jobs(jobs: Sequence[Job], translate: Translate) -> None:
    """Do each job; its output appears when it is whole."""
    for job in jobs:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        part = job.output.with_name(f".{job.output.name}.{os.getpid()}")
        try:
            with open(part, "w", encoding="utf-8", newline="\n") as out:
                stream(read_lines(job.input), out, translate, Path(job.input).name)
            os.replace(part, job.output)
        except OSError as error:
            raise ConfigError(f"{job.output}: cannot be written: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int], None]]:
    """Lines done and their rate, if anyone looks at stderr."""
    console = rich.console.Console(file=sys.stderr)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.completed} lines, {task.fields[rate]:.0f} a second"),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, rate=0.0)

        def advance(lines: int) -> None:
            bar.advance(task, lines)
            done = bar.tasks[task]
            bar.update(task, rate=done.completed / max(done.elapsed or 0.0, 1e-9))

        yield advance
