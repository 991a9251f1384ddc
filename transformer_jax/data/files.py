"""Parallel text on disk: plain or compressed, two files side by side or one with two columns."""

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import logging
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from transformer_jax.config import ConfigError
from transformer_jax.types import Pair

logger = logging.getLogger(__name__)
_BLOCK = 1 << 20
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")  # endings of files that are unpacked


def read_lines(path: str | Path | int) -> Iterator[str]:
    r"""Lines of a UTF-8 file or file descriptor, split on "\n" only.

    A byte order mark at the start and "\r\n" are understood; .gz, .bz2, .xz and .zst are unpacked.

    Raises:
        ConfigError: names file and line of bytes that are not UTF-8, or the file that is missing
            or damaged.
    """
    name = "standard input" if isinstance(path, int) else path
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    raise ConfigError(
                        f"{name}:{number}: got byte 0x{byte:02X}, allowed: UTF-8"
                    ) from None
                yield line.removesuffix("\n").removesuffix("\r")
    except _unreadable() as error:
        raise ConfigError(f"{name}: cannot be read: {_reason(error)}") from None


def count_lines(path: str) -> int:
    """Number of lines that read_lines would give, all of which can be decoded.

    NUL characters, which the tokenizer leaves out, are counted and logged.

    Raises:
        ConfigError: as read_lines.
    """
    nulls, first_null = 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    count, last = 0, b"\n"
    try:
        with _open(path) as file:
            while block := file.read(_BLOCK):
                decoder.decode(block)
                if not nulls and (place := block.find(b"\0")) >= 0:
                    first_null = count + block[:place].count(b"\n") + 1
                nulls += block.count(b"\0")
                count += block.count(b"\n")
                last = block[-1:]
            decoder.decode(b"", final=True)
    except UnicodeDecodeError:  # it does not know the line
        return sum(1 for _ in read_lines(path))
    except _unreadable() as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None
    if nulls:
        logger.warning("%s:%d: %d NUL characters from here on, left out", path, first_null, nulls)
    return count + (last != b"\n")


def read_parallel(source: str | Path, target: str | Path) -> list[Pair]:
    """All pairs of two files, line by line.

    Raises:
        ConfigError: the files have different numbers of lines.
    """
    return list(TextPairs(((str(source), str(target)),)))


class TextPairs:
    """Pairs of files, read anew each time they are asked for: a corpus never stands in memory.

    Args:
        files: source and target file of each piece, read one after the other; None for the target
            where the source is a table of two columns, and None for the source of text alone.

    Raises:
        ConfigError: two files have different numbers of lines; when reading, a table row without
            two columns, by file and line.
    """

    def __init__(self, files: tuple[tuple[str | None, str | None], ...]) -> None:
        self.files = files
        self._count = sum(_count(*pair) for pair in files)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Pair]:
        for source, target in self.files:
            if source is None:
                yield from (Pair("", line) for line in read_lines(cast(str, target)))
            elif target is None:
                yield from _read_table(source)
            else:
                lines = zip(read_lines(source), read_lines(target), strict=True)
                yield from (Pair(*pair) for pair in lines)

    def fingerprint(self) -> str:
        """Hash of the content of all files, whatever their names."""
        digest = hashlib.sha256()
        for path in (path for pair in self.files for path in pair):
            if path is not None:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            digest.update(b"\n")
        return digest.hexdigest()


class Entry(NamedTuple):
    """What one value of a list of files stands for."""

    name: str
    pairs: TextPairs


def entries(
    sources: tuple[str, ...],
    targets: tuple[str, ...],
    flags: tuple[str, str],
    with_source: bool = True,
) -> list[Entry]:
    """The files that two lists of names or patterns stand for, one Entry for each value.

    A pattern such as train-*.en.gz stands for its files in the order of their names. A table
    (.tsv) holds both sides, so that no target belongs to it.

    Args:
        sources: values of the source option.
        targets: values of the target option.
        flags: how the two options are written, for complaints.
        with_source: False: where there are no sources, the targets are text for a language model.

    Raises:
        ConfigError: a pattern without files, or sides of different numbers.
    """
    if not (with_source or sources):
        return [
            Entry(value, TextPairs(tuple((None, path) for path in expand(value, flags[1]))))
            for value in targets
        ]
    sided = [value for value in sources if not _is_table(value)]
    if len(sided) != len(targets):
        raise ConfigError(
            f"{flags[1]}: got {len(targets)} files, allowed: {len(sided)}, "
            f"one for each of {flags[0]}"
        )
    found, rest = [], iter(targets)
    for value in sources:
        paths = expand(value, flags[0])
        if _is_table(value):
            found.append(Entry(value, TextPairs(tuple((path, None) for path in paths))))
            continue
        target = next(rest)
        others = expand(target, flags[1])
        if len(paths) != len(others):
            raise ConfigError(
                f"{flags[1]}: got {len(others)} files for {target!r}, "
                f"allowed: {len(paths)}, as for {value!r}"
            )
        found.append(Entry(value, TextPairs(tuple(zip(paths, others, strict=True)))))
    return found


def expand(value: str, flag: str) -> list[str]:
    """The files that a pattern such as "parts/*.en.gz" matches, sorted; a plain name stays.

    Raises:
        ConfigError: a pattern that no file matches.
    """
    if Path(value).exists() or not glob.has_magic(value):
        return [value]
    paths = sorted(p for p in glob.glob(value, recursive=True) if not Path(p).is_dir())
    if not paths:
        raise ConfigError(f"{flag}: got {value!r}, allowed: a pattern that some file matches")
    return paths


def _is_table(name: str) -> bool:
    return ".tsv" in Path(name).suffixes[-2:]


def _read_table(path: str) -> Iterator[Pair]:
    """Quotes are ordinary characters; what has not two columns is no pair."""
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ConfigError(
                f"{path}:{number}: got {len(columns)} columns, allowed: 2, source and target"
            )
        yield Pair(*columns)


def _count(source: str | None, target: str | None) -> int:
    if source is None or target is None:
        return count_lines(cast(str, source or target))
    counts = count_lines(source), count_lines(target)
    if counts[0] != counts[1]:
        raise ConfigError(
            f"{source} has {counts[0]} lines and {target} has {counts[1]}; "
            "line i of one must translate line i of the other"
        )
    return counts[0]


def _open(path: str | Path | int) -> IO[bytes]:
    if isinstance(path, int):
        return open(path, "rb")
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    if suffix == ".bz2":
        return cast(IO[bytes], bz2.open(path, "rb"))
    if suffix == ".xz":
        return cast(IO[bytes], lzma.open(path, "rb"))
    if suffix == ".zst":
        return io.BufferedReader(_ZstFile(path), _BLOCK)
    return open(path, "rb")


class _ZstFile(io.RawIOBase):
    """What is packed in a .zst file; zstandard's own reader takes one cut short for a whole one."""

    def __init__(self, path: str | Path) -> None:
        import zstandard

        self._new = lambda: zstandard.ZstdDecompressor().decompressobj()
        self._frame, self._bytes = self._new(), b""
        self._file = open(path, "rb")  # noqa: SIM115  # close() does

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._bytes:
            packed = self._frame.unused_data or self._file.read(_BLOCK)
            if not packed and self._frame.eof:
                return 0
            if not packed:
                raise EOFError("ends before the end-of-stream marker was reached")
            if self._frame.eof:
                self._frame = self._new()
            self._bytes = self._frame.decompress(packed)
        count = min(len(buffer), len(self._bytes))
        buffer[:count], self._bytes = self._bytes[:count], self._bytes[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _unreadable() -> tuple[type[Exception], ...]:
    """What reading a missing or damaged file raises."""
    errors: tuple[type[Exception], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
    try:
        import zstandard
    except ImportError:  # then no such file has been opened
        return errors
    return (*errors, zstandard.ZstdError)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
