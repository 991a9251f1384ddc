"""From pairs to the stream of batches: nothing lost, nothing cut, everything counted."""

import itertools
import logging
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.config import Config, ConfigError, DataConfig, TokenizerConfig
from transformer_jax.data import pipeline
from transformer_jax.data.batching import collate
from transformer_jax.data.pipeline import encode_pairs, eval_batches, train_batches, train_data
from transformer_jax.data.tokenizer import EOS, START, Tokenizer
from transformer_jax.types import Batch, Pair

WORDS = "one two three four five six seven eight nine ten".split()


def pair(number: int) -> Pair:
    """A pair that is unlike all others: its number, in words and in digits."""
    words = " ".join(WORDS[int(digit)] for digit in str(number))
    return Pair(words, " ".join(reversed(str(number))))


PAIRS = [pair(i * i) for i in range(100)]
CONFIG = Config(
    data=DataConfig(
        max_source_tokens=40, max_target_tokens=20, global_batch_tokens=160, num_buckets=3
    ),
    tokenizer=TokenizerConfig(vocab_size=300, kind="bpe"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, CONFIG.tokenizer)


def with_limits(source: int, target: int) -> Config:
    data = replace(CONFIG.data, max_source_tokens=source, max_target_tokens=target)
    return replace(CONFIG, data=data)


def pairs_in(batch: Batch, tokenizer: Tokenizer) -> list[Pair]:
    """The text of every real row; filler rows are empty in all arrays."""
    found = []
    for src, src_seg, tgt_in, tgt_out, tgt_seg in zip(*batch[:5], strict=True):
        if not src_seg.any():
            assert not (src.any() or tgt_in.any() or tgt_out.any() or tgt_seg.any())
            continue
        source, target = src[src_seg > 0], tgt_out[tgt_seg > 0]
        assert source[-1] == target[-1] == EOS and (tgt_in[0], src[src_seg == 0].sum()) == (
            START,
            0,
        )
        found.append(Pair(tokenizer.decode(source), tokenizer.decode(target)))
    return found


# ---- Encoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_pairs_are_encoded_in_order_whatever_the_chunk(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    """Bug: F14: the last chunk is lost, or the offsets start anew in each."""
    monkeypatch.setattr(pipeline, "_CHUNK", chunk)
    pairs = [*PAIRS[:30], Pair("", "x"), Pair("y", ""), *PAIRS[30:50]]
    encoded = encode_pairs(pairs, tokenizer)
    for side, flat, ends in ((0, encoded.src_ids, encoded.src_ends), (1, *encoded[2:4])):
        assert len(ends) == len(pairs) + 1 and ends[-1] == len(flat)
        for i, p in enumerate(pairs):
            expected = tokenizer.encode_source([p[side]])[0]
            assert flat[ends[i] : ends[i + 1]].tolist() == expected


def test_no_pairs_can_be_encoded(tokenizer: Tokenizer):
    """Bug: a run without validation files dies at its start."""
    assert encode_pairs([], tokenizer).lengths.shape == (0, 2)


# ---- Training -----------------------------------------------------------------------------------


def test_what_is_left_out_is_counted(tokenizer: Tokenizer):
    """Bug: F35: pairs vanish without a word, or the wrong pairs do."""
    pairs = [*PAIRS, Pair("", "leer"), Pair("blank", " "), pair(10**30), pair(10**31)]
    data = train_data(pairs, tokenizer, CONFIG, row_multiple=1)
    assert data.report.startswith("kept 100 of 104 training pairs (2 empty, 2 too long); ")
    batches = train_batches(data, 0, data.plan.batches_per_epoch)
    found = Counter(p for batch in batches for p in pairs_in(batch, tokenizer))
    assert found == Counter(PAIRS)


def test_the_report_tells_batches_fill_and_shapes(tokenizer: Tokenizer):
    """Bug: F117: the number of compilations is not printed, or is not what happens."""
    data = train_data(PAIRS, tokenizer, CONFIG, row_multiple=2)
    batches = list(train_batches(data, 0, data.plan.batches_per_epoch))
    real = sum(int(b.src_segments.sum() + b.tgt_segments.sum()) for b in batches)
    slots = sum(b.src_ids.size + b.tgt_out_ids.size for b in batches)
    shapes = {f"{len(b.src_ids)}x({b.src_ids.shape[1]}+{b.tgt_out_ids.shape[1]})" for b in batches}
    found = re.search(r"; (\d+) batches an epoch, fill (\S+)%, shapes (.*)$", data.report)
    assert found
    assert int(found[1]) == len(batches)
    assert float(found[2]) == pytest.approx(100 * real / slots, abs=0.06)
    assert shapes <= set(found[3].split()) and len(found[3].split()) <= CONFIG.data.num_buckets


def test_nothing_left_is_an_error(tokenizer: Tokenizer):
    """Bug: F35: the limit is below every length, and training loops over nothing."""
    with pytest.raises(ConfigError) as error:
        train_data(PAIRS, tokenizer, with_limits(1, 20), row_multiple=1)
    assert "--data.max-source-tokens" in str(error.value) and "\n" not in str(error.value)
    assert "kept 0 of 100 training pairs (0 empty, 100 too long)" in str(error.value)


def test_less_than_half_is_a_warning(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    """Bug: F35: 1,000,000 pairs become 117,706, and nobody notices."""
    lengths = encode_pairs(PAIRS, tokenizer).lengths
    limit = int(np.sort(lengths[:, 0])[40])
    with caplog.at_level(logging.WARNING):
        train_data(PAIRS, tokenizer, with_limits(limit, 20), row_multiple=1)
    kept = int((lengths[:, 0] <= limit).sum())
    assert ("less than half" in caplog.text) == (kept < 50)
    assert kept < 50, "the example must be one"
    caplog.clear()
    train_data(PAIRS, tokenizer, CONFIG, row_multiple=1)
    assert not caplog.records


def test_the_stream_goes_on_where_it_stopped(tokenizer: Tokenizer):
    """Bug: F105: a resumed run sees its first batches again; prefetching mixes the order."""
    data = train_data(PAIRS, tokenizer, CONFIG, row_multiple=1)
    n = 2 * data.plan.batches_per_epoch + 3
    whole = list(train_batches(data, 0, n))
    assert len(whole) == n
    fresh = train_data(PAIRS, tokenizer, CONFIG, row_multiple=1)
    for first in (1, data.plan.batches_per_epoch, n - 1, n):
        part = list(train_batches(fresh, first, n))
        assert len(part) == n - first
        for got, expected in zip(part, whole[first:], strict=True):
            for a, b in zip(got[:5], expected[:5], strict=True):
                np.testing.assert_array_equal(a, b)
    for i, batch in enumerate(whole):
        expected = collate(data.encoded, *data.plan[i])
        np.testing.assert_array_equal(batch.src_ids, expected.src_ids)


def test_a_run_that_is_over_has_no_batches(tokenizer: Tokenizer):
    """Bug: lowering --train.steps below the step that was reached crashes the resumed run."""
    data = train_data(PAIRS, tokenizer, CONFIG, row_multiple=1)
    assert list(train_batches(data, 7, 3)) == []


# ---- Evaluation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_tokens", "row_multiple"), [(30, 1), (160, 1), (160, 8), (9999, 3)])
def test_evaluation_covers_every_pair(tokenizer: Tokenizer, batch_tokens: int, row_multiple: int):
    """Bug: F13, F103, F115: long pairs are filtered as in training, the last batch is dropped, or
    it has another shape than the devices divide."""
    pairs = [*PAIRS[:37], pair(10**60), Pair("", "x"), Pair("y", ""), PAIRS[0]]
    encoded = encode_pairs(pairs, tokenizer)
    batches = list(eval_batches(encoded, batch_tokens, row_multiple))
    found = Counter(
        (tokenizer.decode(src[seg > 0]), tokenizer.decode(tgt[tgt_seg > 0]))
        for batch in batches
        for src, seg, _, tgt, tgt_seg in zip(*batch[:5], strict=True)
        if seg.any()
    )
    assert found == Counter(pairs)
    shapes = {(b.src_ids.shape, b.tgt_out_ids.shape) for b in batches}
    assert len(shapes) <= 2, "each shape is compiled"
    assert all(len(b.src_ids) % row_multiple == 0 for b in batches)
    tokens = sum(int(b.tgt_segments.sum()) for b in batches)
    assert tokens == encoded.tgt_ends[-1]


def test_evaluation_of_nothing_has_no_batches(tokenizer: Tokenizer):
    """Bug: an IndexError for an empty validation set."""
    assert list(eval_batches(encode_pairs([], tokenizer), 100, 1)) == []


def test_evaluation_does_not_depend_on_the_order_of_calls(tokenizer: Tokenizer):
    """Bug: a second evaluation of the same pairs has other batches, and rounds otherwise."""
    encoded = encode_pairs(PAIRS, tokenizer)
    one, two = (list(eval_batches(encoded, 160, 1)) for _ in range(2))
    for a, b in itertools.zip_longest(one, two):
        np.testing.assert_array_equal(a.src_ids, b.src_ids)
