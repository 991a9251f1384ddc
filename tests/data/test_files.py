"""Files as they come: compressed, with two columns, many for a pattern."""

import bz2
import gzip
import lzma
from pathlib import Path

import pytest
import zstandard

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.data.files import TextPairs, count_lines, read_lines
from transformer_jax.data.sources import load_splits
from transformer_jax.types import Pair

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
TEXT = "\ufeffeins\n\nzwei\u2028drei\r\nvier".encode()
LINES = ["eins", "", "zwei\u2028drei", "vier"]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def config(**fields: object) -> DataConfig:
    return DataConfig(**fields)  # type: ignore[arg-type]


def refusal(call, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("suffix", PACK)
def test_packed_files_are_read_like_plain_ones(tmp_path: Path, suffix: str):
    """Bug: compressed bytes are taken for text, or only the first member of a file is read."""
    path = write(tmp_path / f"a.txt{suffix}", PACK[suffix](TEXT))
    assert list(read_lines(path)) == LINES
    assert count_lines(path) == 4
    two = write(tmp_path / f"b.txt{suffix}", PACK[suffix](b"a\n") + PACK[suffix](b"b\n"))
    assert list(read_lines(two)) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_files_are_named(tmp_path: Path, suffix: str):
    """Bug: a file cut in two is read up to its middle, or ends in a traceback."""
    lines = "".join(f"{i * i} {i}\n" for i in range(5000)).encode()
    whole = PACK[suffix](lines)
    for content in (whole[: len(whole) // 2], b"no such format"):
        path = write(tmp_path / f"a.txt{suffix}", content)
        assert refusal(lambda path=path: list(read_lines(path))).startswith(f"{path}: cannot be")


def test_a_table_has_two_columns(tmp_path: Path):
    """Bug: F31: a missing or extra tab shifts columns, or a lone quote swallows lines."""
    table = write(tmp_path / "a.tsv", 'a\tb\n"unbalanced\tc\n\td\n')
    splits = load_splits(config(train_source=(table,)))
    assert list(splits.train) == [("a", "b"), ('"unbalanced', "c"), ("", "d")]
    for row, columns in (("only one", 1), ("x\ty\tz", 3), ("", 1)):
        path = write(tmp_path / "bad.tsv", f"a\tb\n{row}\n")
        said = refusal(lambda path=path: list(TextPairs(((path, None),))))
        assert said == f"{path}:2: got {columns} columns, allowed: 2, source and target"


def test_tables_and_files_side_by_side(tmp_path: Path):
    """Bug: a table takes the target file of its neighbour."""
    table = write(tmp_path / "t.tsv.gz", gzip.compress(b"c\tC\n"))
    files = [write(tmp_path / name, text) for name, text in (("1", "a\n"), ("2", "A\n"))]
    given = config(train_source=(table, files[0]), train_target=(files[1],))
    assert list(load_splits(given).train) == [("c", "C"), ("a", "A")]


def test_patterns_stand_for_their_files_in_order(tmp_path: Path):
    """Bug: files of the two sides are paired in the order of the directory."""
    for number in (2, 10, 1):
        write(tmp_path / f"part-{number:02}.en", f"en{number}\n")
        write(tmp_path / f"part-{number:02}.de", f"de{number}\n")
    given = config(train_source=(str(tmp_path / "*.en"),), train_target=(str(tmp_path / "*.de"),))
    assert list(load_splits(given).train) == [("en1", "de1"), ("en2", "de2"), ("en10", "de10")]
    (tmp_path / "part-02.de").unlink()
    said = refusal(load_splits, given)
    assert "got 2 files" in said and "allowed: 3" in said
    nothing = config(train_source=(str(tmp_path / "*.fr"),), train_target=("x",))
    assert "--data.train-source: got" in refusal(load_splits, nothing)


def test_a_name_with_brackets_is_a_name(tmp_path: Path):
    """Bug: a file called a[1].en is taken for a pattern that nothing matches."""
    path = write(tmp_path / "a[1].en", "x\n")
    assert list(load_splits(config(train_source=(path,), train_target=(path,))).train) == [
        Pair("x", "x")
    ]


def mixture(tmp_path: Path, sizes: list[int], **fields: object) -> DataConfig:
    names = [str(tmp_path / f"{i}.tsv") for i in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        Path(name).write_text("".join(f"s{j}\tt{j}\n" for j in range(size)), encoding="utf-8")
    return config(train_source=tuple(names), **fields)


def test_weights_and_temperature(tmp_path: Path):
    """Bug: weights belong to other files than they were given for, or temperature flattens the
    wrong way."""
    parts = load_splits(mixture(tmp_path, [100, 4], train_weights=(3.0, 1.0))).train.parts
    assert [part.weight for part in parts] == [3.0, 1.0]
    parts = load_splits(mixture(tmp_path, [100, 4], train_temperature=2.0)).train.parts
    assert [part.weight for part in parts] == pytest.approx([10.0, 2.0])
    assert not load_splits(mixture(tmp_path, [100, 4])).train.mixed
    said = refusal(load_splits, mixture(tmp_path, [100, 4], train_weights=(1.0,)))
    assert said.startswith("--data.train-weights: got 1 values, allowed: 2")
    said = refusal(load_splits, mixture(tmp_path, [100, 4], train_target_langs=("de",) * 3))
    assert said.startswith("--data.train-target-langs: got 3 values, allowed: 2")


def test_the_content_of_a_corpus_is_its_name(tmp_path: Path):
    """Bug: after a file was changed, the ids of the old one are found in the cache."""
    given = mixture(tmp_path, [3, 2])
    first = load_splits(given).train.fingerprint()
    assert load_splits(given).train.fingerprint() == first
    Path(given.train_source[1]).write_text("s0\tt0\ns1\tt2\n", encoding="utf-8")
    assert load_splits(given).train.fingerprint() != first
