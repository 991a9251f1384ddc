"""Sentence pairs from files and from TFDS: every line in its place, or a line that says why."""

import os
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.data import prepared
from transformer_jax.data.files import read_lines, read_parallel
from transformer_jax.data.sources import load_splits
from transformer_jax.data.tokenizer import clean
from transformer_jax.types import Pair

REPOSITORY = Path(__file__).resolve().parents[2]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return str(path)


def refusal(call, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- Lines --------------------------------------------------------------------------------------


def test_lines_end_at_newline_only(tmp_path: Path):
    """Bug: F5: str.splitlines() or universal newlines cut one sentence into several."""
    breaks = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
    lines = [f"one{character}two" for character in breaks] + ["three\rfour", ""]
    path = write(tmp_path / "a.txt", "".join(line + "\n" for line in lines))
    assert list(read_lines(path)) == lines


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("", []),
        ("\n", [""]),
        ("a", ["a"]),
        ("a\n", ["a"]),
        ("a\n\n", ["a", ""]),
        ("a\n\nb", ["a", "", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        (" a \n\tb\n", [" a ", "\tb"]),
        ("a\n\r\n", ["a", ""]),
        ('"unbalanced\tb\n', ['"unbalanced\tb']),
    ],
)
def test_line_ends(tmp_path: Path, content: str, lines: list[str]):
    """Bug: a last line without its end is lost or doubled; "\\r" stays; spaces are stripped."""
    assert list(read_lines(write(tmp_path / "a.txt", content))) == lines


def test_byte_order_mark(tmp_path: Path):
    """Bug: F9: the mark makes an unknown token of the first word, or of one inside a corpus."""
    content = b"\xef\xbb\xbfGuten Tag\n" + "\ufeffzwei\n\ufeff\n".encode()
    lines = list(read_lines(write(tmp_path / "a.txt", content)))
    assert lines[0] == "Guten Tag"
    assert [clean(line) for line in lines] == ["Guten Tag", "zwei", ""]


def test_null_characters_are_kept_out_of_the_tokenizer(tmp_path: Path):
    """Bug: F10: NUL bytes reach SentencePiece, or cut the line short."""
    (line,) = read_lines(write(tmp_path / "a.txt", b"ab\x00cd\n"))
    assert clean(line) == "abcd"


@pytest.mark.parametrize("broken", [b"caf\xe9", b"\xff\xfe", b"cut \xe7\x88", b"\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, broken: bytes):
    """Bug: F34: UnicodeDecodeError without a line, or silent replacement."""
    content = "gut ü\n".encode() * 16 + broken + b"\n" + b"gut\n" * 13
    path = write(tmp_path / "a.txt", content)
    said = refusal(lambda: list(read_lines(path)))
    assert said.startswith(f"{path}:17: got byte 0x") and "UTF-8" in said


def test_files_are_utf8_in_any_locale(tmp_path: Path):
    """Bug: F34: open() takes its encoding from the locale."""
    path = write(tmp_path / "ä.txt", "größer 爿\n")
    code = """
        import sys
        from transformer_jax.data.files import read_lines
        assert list(read_lines(sys.argv[1])) == ["gr\\u00f6\\u00dfer \\u723f"]
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), path],
        cwd=REPOSITORY,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"},
        check=True,
    )


@pytest.mark.parametrize("name", ["missing.txt", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str):
    """Bug: a traceback for a misspelt path or a directory."""
    assert refusal(lambda: list(read_lines(tmp_path / name))).startswith(f"{tmp_path / name}: ")


# ---- Parallel files -----------------------------------------------------------------------------


def test_pairs_keep_blank_lines(tmp_path: Path):
    """Bug: F1: a blank line on one side shifts all pairs after it."""
    source = write(tmp_path / "a", "one\n\nthree\n")
    target = write(tmp_path / "b", "eins\nzwei\n\n")
    assert read_parallel(source, target) == [
        Pair("one", "eins"),
        Pair("", "zwei"),
        Pair("three", ""),
    ]


@pytest.mark.parametrize("target", ["x\n" * 99, "x\n" * 100 + "\n", ""])
def test_different_numbers_of_lines(tmp_path: Path, target: str):
    """Bug: F7: zip() stops at the shorter file, and training goes on with shifted pairs."""
    one, other = write(tmp_path / "a", "x\n" * 100), write(tmp_path / "b", target)
    said = refusal(read_parallel, one, other)
    assert one in said and other in said
    assert " 100 " in said and f" {target.count(chr(10))};" in said


def text_config(tmp_path: Path, **files: tuple[str, ...]) -> DataConfig:
    return DataConfig(
        **{k: tuple(str(tmp_path / name) for name in names) for k, names in files.items()}
    )


def test_several_files_are_read_in_order(tmp_path: Path):
    """Bug: files of the two sides are paired crosswise, or a part is read from another's files."""
    for name in "abcdefgh":
        write(tmp_path / name, f"{name}1\n{name}2\n")
    splits = load_splits(
        text_config(
            tmp_path,
            train_source=("a", "b"),
            train_target=("c", "d"),
            valid_source=("e",),
            valid_target=("f",),
            test_source=("g",),
            test_target=("h",),
        )
    )
    assert list(splits.train) == [("a1", "c1"), ("a2", "c2"), ("b1", "d1"), ("b2", "d2")]
    assert splits.valid == {"valid": [("e1", "f1"), ("e2", "f2")]}
    assert splits.test == {"test": [("g1", "h1"), ("g2", "h2")]}


def test_absent_held_out_files_are_no_part(tmp_path: Path):
    """Bug: an empty part, which evaluation divides by."""
    write(tmp_path / "a", "x\n")
    splits = load_splits(text_config(tmp_path, train_source=("a",), train_target=("a",)))
    assert (splits.valid, splits.test) == ({}, {})


def test_parts_that_do_not_belong_together(tmp_path: Path):
    """Bug: two source files and one target file are zipped; no files at all train on nothing."""
    write(tmp_path / "a", "x\n")
    two = text_config(tmp_path, train_source=("a", "a"), train_target=("a",))
    assert "--data.train-target: got 1 files, allowed: 2" in refusal(load_splits, two)
    assert "--data.train-source: got no files" in refusal(load_splits, DataConfig())


def test_an_embedded_language_that_is_not_there():
    """Bug: a traceback for a language without catalogues."""
    config = DataConfig(source="embedded", target_lang="tlh")
    assert refusal(load_splits, config).startswith("--data.target-lang: ")


# ---- TFDS ---------------------------------------------------------------------------------------

PREPARE = """
    import sys
    import tensorflow_datasets as tfds

    class ParallelText(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {lang: tfds.features.Text() for lang in ("en", "de")}
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("en", "de"),
                disable_shuffling=True,
            )

        def _split_generators(self, manager):
            sizes = {"train": 20, "validation": 5, "test": 3}
            return {split: self._generate_examples(n) for split, n in sizes.items()}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"en": f"line {i}\\u2028more", "de": f"Zeile {i} gr\\u00f6\\u00dfer"}

    ParallelText(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
    assert "tensorflow" not in sys.modules
"""


# The official builder reads files of WMT's own formats from disk instead of from the network.
PREPARE_WMT = """
    import sys
    from pathlib import Path

    import tensorflow_datasets as tfds
    import tree
    from tensorflow_datasets.translate import wmt

    name, options = "wmt14_translate/de-en", {"file_format": "array_record"}
    builder = tfds.builder(name, data_dir=sys.argv[1], **options)
    root = Path(sys.argv[1]) / "as downloaded"
    for split, subsets in builder.subsets.items():
        for name in subsets:
            for lang, path in zip(("de", "en"), wmt.DATASET_MAP[name].get_path("de")):
                path = root / path
                path.parent.mkdir(parents=True, exist_ok=True)
                lines = [f"{split} {lang} {name} {i}" for i in range(3)]
                if path.name.endswith(".sgm"):
                    lines = [f'<seg id="{i}">{line}</seg>' for i, line in enumerate(lines, 1)]
                path.write_text("\\n".join(lines) + "\\n", encoding="utf-8")

    def local(self, urls):
        return tree.map_structure(lambda url: str(root), urls)

    tfds.download.DownloadManager.download_and_extract = local
    builder.download_and_prepare()
    print({split: info.num_examples for split, info in builder.info.splits.items()})
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set on disk, prepared by another process: this one knows only the files."""
    directory = str(tmp_path_factory.mktemp("tfds"))
    command = [sys.executable, "-c", textwrap.dedent(PREPARE), directory]
    subprocess.run(command, check=True, capture_output=True)
    return directory


def tfds_config(directory: str, /, **fields: str) -> DataConfig:
    given = {"source": "tfds", "tfds_name": "parallel_text", "tfds_dir": directory}
    return DataConfig(**(given | fields))


def test_tfds_splits_are_sequences_of_pairs(tfds_dir: str):
    """Bug: sides are swapped, bytes are not decoded, or the sequence does not end where it ends."""
    splits = load_splits(tfds_config(tfds_dir))
    expected = [Pair(f"line {i}\u2028more", f"Zeile {i} größer") for i in range(20)]
    train = splits.train.parts[0].pairs
    assert len(train) == 20
    assert list(train) == expected, "iteration must stop by itself"
    assert train[3] == expected[3] and train[-1] == expected[-1]
    assert train[5:11:2] == expected[5:11:2] and train[15:99] == expected[15:]
    assert isinstance(train[0], Pair)
    with pytest.raises(IndexError):
        train[20]
    assert [len(part) for part in (*splits.valid.values(), *splits.test.values())] == [5, 3]
    assert "tensorflow" not in sys.modules


def test_tfds_sides_and_parts_of_splits(tfds_dir: str):
    """Bug: source_lang and target_lang are ignored; TFDS's slices are not understood."""
    fields = {"source_lang": "de", "target_lang": "en", "tfds_train_split": "train[:10%]"}
    splits = load_splits(tfds_config(tfds_dir, **fields, tfds_test_split=""))
    assert list(splits.train) == [
        ("Zeile 0 größer", "line 0\u2028more"),
        ("Zeile 1 größer", "line 1\u2028more"),
    ]
    assert splits.test == {}


def test_the_official_wmt_builder_without_network(tmp_path: Path):
    """Bug: F139, F141: WMT needs the network although it is prepared, or TensorFlow; the direction
    is that of the name instead of that of the features."""
    command = [sys.executable, "-c", textwrap.dedent(PREPARE_WMT), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    splits = load_splits(
        DataConfig(
            source="tfds",
            tfds_name="wmt14_translate/de-en",
            tfds_dir=str(tmp_path),
            source_lang="en",
            target_lang="de",
        )
    )
    train = list(splits.train)
    assert len(train) == 9, "Europarl, Common Crawl and News Commentary, three lines each"
    for source, target in (*train, *splits.valid["valid"], *splits.test["test"]):
        assert source.split()[1] == "en" and target.split()[1] == "de"
        assert source.split()[2:] == target.split()[2:]
    assert "newstest2014" in splits.test["test"][0].source
    assert "tensorflow" not in sys.modules


def test_without_network_the_answer_comes_at_once(tfds_dir: str, monkeypatch: pytest.MonkeyPatch):
    """Bug: F139: TFDS tries for minutes before it says that there is no network."""
    import tensorflow_datasets as tfds

    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", None)
    said = refusal(load_splits, tfds_config(tfds_dir, tfds_name="wmt14_translate/de-en"))
    assert "is not prepared in " in said and "on a machine with network run python -c" in said
    assert len(load_splits(tfds_config(tfds_dir)).train) == 20, "what is prepared needs none"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("tfds_name", "parallel_texts", ["--data.tfds-name", "parallel_texts", "not found"]),
        ("tfds_name", "", ["--data.tfds-name", "''"]),
        ("tfds_dir", "nowhere", ["--data.tfds-name", "parallel_text", "not found"]),
        ("source_lang", "fr", ["--data.source-lang", "['fr']", "['de', 'en']"]),
        ("tfds_valid_split", "valid", ["'valid'", "['test', 'train', 'validation']"]),
        ("tfds_train_split", "train[:x]", ["'train[:x]'"]),
    ],
)
def test_tfds_mistakes_are_one_line(tfds_dir: str, field: str, value: str, words: list[str]):
    """Bug: F139: a traceback out of TFDS for a misspelt name, feature or split."""
    said = refusal(load_splits, tfds_config(tfds_dir, **{field: value}))
    for word in words:
        assert word in said


def test_a_data_set_that_cannot_be_downloaded_says_how_to_prepare_it(
    tfds_dir: str, monkeypatch: pytest.MonkeyPatch
):
    """Bug: F139: the first run without network ends in a traceback of the download."""
    import tensorflow_datasets as tfds

    def no_network(self, **_):
        raise ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr(prepared, "_network", lambda: True)
    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", no_network)
    said = refusal(load_splits, tfds_config(tfds_dir, tfds_name="wmt14_translate/de-en"))
    assert "wmt14_translate/de-en is not prepared in " in said and tfds_dir in said
    assert "download_and_prepare()" in said
