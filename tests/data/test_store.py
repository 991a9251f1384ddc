"""Encoded once, found again, never mistaken for something else."""

from pathlib import Path

import numpy as np
import pytest

from transformer_jax.config import ConfigError, TokenizerConfig
from transformer_jax.data import store as store_module
from transformer_jax.data.sources import Corpus, Part
from transformer_jax.data.store import encode_pairs, open_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Pair

PAIRS = [Pair(f"the cat {i} sees the dog", f"die Katze {i} sieht Hunde") for i in range(50)]
PAIRS += [Pair("", "x"), Pair("same", "same"), PAIRS[3], Pair("\u00fc\u2028", "\U0001f98a")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=295))


def corpus(pairs: list[Pair]) -> Corpus:
    return Corpus([Part("x", pairs, ("en", "de"))])


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_what_is_stored_is_what_was_encoded(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    """Bug: ids of the wrong width, offsets that start anew in each chunk, texts cut in a letter."""
    monkeypatch.setattr(store_module, "_CHUNK", chunk)
    stored = open_store(corpus(PAIRS), tokenizer, True, True, str(tmp_path))
    expected = encode_pairs(PAIRS, tokenizer)
    for got, want in zip(stored.encoded, expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert np.flatnonzero(stored.identical).tolist() == [51]
    assert stored.hashes[52] == stored.hashes[3] and len(set(stored.hashes.tolist())) == 53
    assert stored.texts
    for side, texts in enumerate(stored.texts):
        numbers = np.array([53, 0, 50])
        assert texts.take(numbers) == [PAIRS[i][side] for i in numbers]


def test_the_second_time_nothing_is_encoded(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: the cache is written and never read; or read for another text or tokenizer."""
    open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path))
    monkeypatch.setattr(Tokenizer, "encode_target", None)
    again = open_store(corpus(list(PAIRS)), tokenizer, True, False, str(tmp_path))
    assert len(again.identical) == len(PAIRS)
    other = Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=294))
    for changed in (
        lambda: open_store(corpus(PAIRS[:-1]), tokenizer, True, False, str(tmp_path)),
        lambda: open_store(corpus(PAIRS), other, True, False, str(tmp_path)),
        lambda: open_store(corpus(PAIRS), tokenizer, False, False, str(tmp_path)),
    ):
        with pytest.raises(TypeError):  # it is encoded, by a method that is gone
            changed()


def test_a_writer_that_dies_leaves_nothing_that_is_read(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: half a cache after Ctrl-C is taken for a whole one."""
    monkeypatch.setattr(store_module, "_CHUNK", 10)
    real = Tokenizer.encode_target

    def dies(self: Tokenizer, texts: list[str], *rest: object) -> list[list[int]]:
        if PAIRS[20].target in texts:
            raise KeyboardInterrupt
        return real(self, texts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "encode_target", dies)
    with pytest.raises(KeyboardInterrupt):
        open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Tokenizer, "encode_target", real)
    assert len(open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path)).identical) == 54


def test_a_place_that_cannot_be_written_is_named(tokenizer: Tokenizer, tmp_path: Path):
    """Bug: a traceback for a read-only or misspelt directory."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--data\.cache-dir: .*file"):
        open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path / "file"))


def test_two_processes_may_write_at_once(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: the second of two hosts on one file system fails, or overwrites what the first reads."""
    real = store_module._encode

    def slow(*arguments: object) -> object:
        monkeypatch.setattr(store_module, "_encode", real)
        open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path))  # the other is quicker
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store_module, "_encode", slow)
    found = open_store(corpus(PAIRS), tokenizer, True, False, str(tmp_path))
    assert len(found.identical) == 54 and len(list(tmp_path.iterdir())) == 1


def test_an_empty_side_can_be_stored(tokenizer: Tokenizer, tmp_path: Path):
    """Bug: text for a language model has no source ids, and an empty file cannot be mapped."""
    stored = open_store(corpus(PAIRS), tokenizer, False, False, str(tmp_path))
    assert stored.encoded.lengths[:, 0].tolist() == [0] * 54
