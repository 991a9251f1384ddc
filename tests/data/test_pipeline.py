"""From pairs to the stream of batches: nothing lost, nothing cut, everything counted."""

import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from transformer_jax.config import Config, ConfigError, DataConfig, TokenizerConfig
from transformer_jax.data import pipeline, store
from transformer_jax.data.pipeline import (
    Position,
    TrainData,
    eval_batches,
    train_batches,
    train_data,
)
from transformer_jax.data.sources import Corpus, Part
from transformer_jax.data.store import encode_pairs
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


# Every way to make batches; each must hold each pair once an epoch.
LAYOUTS: dict[str, dict[str, Any]] = {
    "one a row": {"pairs_per_row": 1},
    "two a row": {"pairs_per_row": 2},
    "shared rows": {},
    "packed": {"batching": "packed"},
    "packed long": {"batching": "packed", "packed_length": 100},
    "drawn": {"subword_sampling": 0.1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, CONFIG.tokenizer)


def layout(cache: str, name: str = "one a row", /, **fields: Any) -> Config:
    data = replace(CONFIG.data, cache_dir=cache, **(LAYOUTS[name] | fields))
    return replace(CONFIG, data=data)


def prepare(pairs: list[Pair], tokenizer: Tokenizer, config: Config, devices: int = 1) -> TrainData:
    return train_data(Corpus([Part("test", pairs, ("en", "de"))]), tokenizer, config, devices)


def stream(
    data: TrainData, count: int, start: Position | None = None, shard: tuple[int, int] = (0, 1)
) -> list[tuple[Batch, Position]]:
    return list(train_batches(data, start or Position(), count, shard))


def epochs(data: TrainData, count: int = 1) -> Iterator[Batch]:
    """The batches of the first epochs."""
    for batch, position in train_batches(data, Position(), 1000):
        yield batch
        if position == (count - 1, data.order.size):
            return


def pairs_in(batch: Batch, tokenizer: Tokenizer) -> list[Pair]:
    """The text of every segment of every row; padding and filler are 0 in all arrays."""
    found = []
    for src, src_seg, tgt_in, tgt_out, tgt_seg in zip(*batch[:5], strict=True):
        assert not (src[src_seg == 0].any() or tgt_in[tgt_seg == 0].any())
        assert not tgt_out[tgt_seg == 0].any()
        assert set(src_seg) | {0} == set(tgt_seg) | {0}, "each source has its target"
        for segment in range(1, int(src_seg.max(initial=0)) + 1):
            source, target = src[src_seg == segment], tgt_out[tgt_seg == segment]
            inputs = tgt_in[tgt_seg == segment]
            assert source[-1] == target[-1] == EOS and inputs[0] == START
            assert inputs[1:].tolist() == target[:-1].tolist(), "shifted inside its segment"
            found.append(Pair(tokenizer.decode(source), tokenizer.decode(target)))
    return found


# ---- Encoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 50, 1000])
def test_pairs_are_encoded_in_order_whatever_the_chunk(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, chunk: int
):
    """Bug: F14: the last chunk is lost, or the offsets start anew in each."""
    monkeypatch.setattr(store, "_CHUNK", chunk)
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


def test_what_is_left_out_is_counted(tokenizer: Tokenizer, cache: str):
    """Bug: F35: pairs vanish without a word, or the wrong pairs do."""
    pairs = [*PAIRS, Pair("", "leer"), Pair("blank", " "), pair(10**30), pair(10**31)]
    data = prepare(pairs, tokenizer, layout(cache))
    assert data.report.startswith("kept 100 of 104 training pairs (2 empty, 2 too long); ")
    found = Counter(p for batch in epochs(data) for p in pairs_in(batch, tokenizer))
    assert found == Counter(PAIRS)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 3])
def test_each_pair_comes_once_an_epoch(tokenizer: Tokenizer, cache: str, name: str, devices: int):
    """Bug: F105, F114: a layout loses the rows that do not fill a batch, or repeats a pair, cuts
    one that does not fit, or gives devices unequal shares."""
    config = layout(cache, name, global_batch_tokens=400, row_multiple=devices)
    data = prepare(PAIRS, tokenizer, config, devices)
    for wanted in (1, 2):
        batches = list(epochs(data, wanted))
        found = Counter(p for batch in batches for p in pairs_in(batch, tokenizer))
        assert found == Counter(PAIRS * wanted)
    for batch in batches:
        rows, source = batch.src_ids.shape
        assert rows % devices == 0
        assert rows * max(source, batch.tgt_out_ids.shape[1]) <= 400, "over the budget"
        if batch.src_positions is not None:
            for segments, positions in (
                (batch.src_segments, batch.src_positions),
                (batch.tgt_segments, batch.tgt_positions),
            ):
                for row, place in zip(segments, positions, strict=True):
                    for segment in range(1, row.max() + 1):
                        where = place[row == segment]
                        assert where.tolist() == list(range(len(where)))
        most = config.data.pairs_per_row or 1000
        assert batch.src_segments.max() <= most


def test_the_report_tells_batches_fill_and_shapes(tokenizer: Tokenizer, cache: str):
    """Bug: F117: the number of compilations is not printed, or is not what happens."""
    for name in ("one a row", "shared rows", "packed"):
        data = prepare(PAIRS, tokenizer, layout(cache, name))
        batches = list(epochs(data))
        real = sum(int((b.src_segments > 0).sum() + (b.tgt_segments > 0).sum()) for b in batches)
        slots = sum(b.src_ids.size + b.tgt_out_ids.size for b in batches)
        shapes = {
            f"{len(b.src_ids)}x({b.src_ids.shape[1]}+{b.tgt_out_ids.shape[1]})" for b in batches
        }
        found = re.search(r"; (\d+) batches an epoch, fill (\S+)%, shapes (.*)$", data.report)
        assert found
        assert int(found[1]) == len(batches)
        assert float(found[2]) == pytest.approx(100 * real / slots, abs=0.06)
        assert shapes <= set(found[3].split()) and len(found[3].split()) <= CONFIG.data.num_buckets


def test_nothing_left_is_an_error(tokenizer: Tokenizer, cache: str):
    """Bug: F35: the limit is below every length, and training loops over nothing."""
    with pytest.raises(ConfigError) as error:
        prepare(PAIRS, tokenizer, layout(cache, max_source_tokens=1))
    assert "--data.max-source-tokens" in str(error.value) and "\n" not in str(error.value)
    assert "kept 0 of 100 training pairs (0 empty, 100 too long)" in str(error.value)


def test_less_than_half_is_a_warning(
    tokenizer: Tokenizer, cache: str, caplog: pytest.LogCaptureFixture
):
    """Bug: F35: 1,000,000 pairs become 117,706, and nobody notices."""
    lengths = encode_pairs(PAIRS, tokenizer).lengths
    limit = int(np.sort(lengths[:, 0])[40])
    kept = int((lengths[:, 0] <= limit).sum())
    assert kept < 50, "the example must be one"
    with caplog.at_level(logging.WARNING):
        prepare(PAIRS, tokenizer, layout(cache, max_source_tokens=limit))
    assert f"less than half of the training pairs is left: kept {kept} of 100" in caplog.text
    caplog.clear()
    prepare(PAIRS, tokenizer, layout(cache))
    assert not caplog.records


@pytest.mark.parametrize("name", ["one a row", "shared rows", "packed", "drawn"])
def test_the_stream_goes_on_where_it_stopped(
    tokenizer: Tokenizer, cache: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Bug: F105, F107: a resumed run sees its first batches again, or another order or other
    pieces than the run that was not stopped; at the end of an epoch, of a segment, or within."""
    monkeypatch.setattr(pipeline, "_WINDOW", 16)
    monkeypatch.setattr(pipeline, "_SEGMENT", 32)
    monkeypatch.setattr(pipeline, "_SEGMENT_BATCHES", 1)
    data = prepare(PAIRS, tokenizer, layout(cache, name))
    assert data.segment < 100
    whole = stream(data, 3 * round(data.batches_per_epoch))
    assert whole[-1][1].epoch >= 2
    fresh = prepare(PAIRS, tokenizer, layout(cache, name))
    for done in range(len(whole) + 1):
        start = whole[done - 1][1] if done else Position()
        part = stream(fresh, len(whole) - done, start)
        for (got, place), (expected, right) in zip(part, whole[done:], strict=True):
            assert place == right
            for a, b in zip(got[:5], expected[:5], strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_place_between_batches_is_refused(tokenizer: Tokenizer, cache: str):
    """Bug: F106: a position of other data or other batches is taken, and pairs come twice."""
    data = prepare(PAIRS, tokenizer, layout(cache))
    after = stream(data, 1)[0][1].examples
    for examples in (after - 1, 101):
        with pytest.raises(ConfigError, match=f"after {examples} examples of epoch 0"):
            stream(data, 1, Position(0, examples))


def test_a_run_that_is_over_has_no_batches(tokenizer: Tokenizer, cache: str):
    """Bug: lowering --train.steps below the step that was reached crashes the resumed run."""
    assert stream(prepare(PAIRS, tokenizer, layout(cache)), 0) == []


def test_an_error_while_batches_are_made_ahead_comes_through(
    tokenizer: Tokenizer, cache: str, monkeypatch: pytest.MonkeyPatch
):
    """Bug: the thread dies, and training waits for ever."""
    data = prepare(PAIRS, tokenizer, layout(cache))

    def damaged(*_: Any, **__: Any) -> Batch:
        raise OSError("disk")

    monkeypatch.setattr(pipeline, "collate", damaged)
    with pytest.raises(OSError, match="disk"):
        stream(data, 2)


@pytest.mark.parametrize("name", ["one a row", "shared rows", "packed", "drawn"])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (4, 1), (1, 2), (2, 4), (3, 2)])
def test_other_numbers_of_shards_go_on(
    tokenizer: Tokenizer, cache: str, name: str, first: int, second: int
):
    """Bug: F103, F106, F121: after a run of 4 processes is stopped in the middle of an epoch and
    goes on with 1, pairs come twice or never; or processes have unequal numbers of batches."""
    multiple = math.lcm(first, second)
    config = layout(cache, name, global_batch_tokens=400, row_multiple=multiple)
    found: Counter[Pair] = Counter()
    size = prepare(PAIRS, tokenizer, config).order.size
    stop = round(0.4 * prepare(PAIRS, tokenizer, config).batches_per_epoch) or 1
    place = Position()
    for shards, count in ((first, stop), (second, 200)):
        data = prepare(PAIRS, tokenizer, config, devices=shards)
        shares = []
        for index in range(shards):
            batches = stream(data, count, place, (index, shards))
            shares.append([x for x in batches if x[1] <= (1, size)])
        assert len({len(share) for share in shares}) == 1
        for together in zip(*shares, strict=True):
            assert len({position for _, position in together}) == 1
            assert len({batch.src_ids.shape for batch, _ in together}) == 1
        found.update(
            p for share in shares for batch, _ in share for p in pairs_in(batch, tokenizer)
        )
        place = shares[0][-1][1]
        assert count == 200 or 0 < place.examples < size, "stopped within the first epoch"
    assert place == Position(1, size)
    assert found == Counter(PAIRS * 2)


def test_filler_must_not_exceed_the_budget(tokenizer: Tokenizer, cache: str):
    """Bug: F114: rows rounded up to the devices take more memory than the user has allowed."""
    longest = int(encode_pairs(PAIRS, tokenizer).lengths.max())
    config = layout(cache, global_batch_tokens=160)
    with pytest.raises(ConfigError) as error:
        prepare(PAIRS, tokenizer, config, devices=64)
    assert "--data.global-batch-tokens: got 160, allowed: at least " in str(error.value)
    assert str(64 * longest) in str(error.value) or "64 devices" in str(error.value)
    config = layout(cache, global_batch_tokens=17 * longest, row_multiple=1, num_buckets=1)
    with pytest.raises(ConfigError, match=r"--data\.row-multiple: got 1, allowed: a mul"):
        prepare(PAIRS, tokenizer, config, devices=4)


def test_drawn_pieces_depend_on_seed_epoch_and_example(tokenizer: Tokenizer, cache: str):
    """Bug: the pieces of each epoch, or of each run, are the same; or the text changes."""

    def pieces(seed: int) -> list[dict[Pair, tuple]]:
        config = replace(layout(cache, "drawn"), seed=seed)
        data = prepare(PAIRS, tokenizer, config)
        found: list[dict[Pair, tuple]] = [{}, {}]
        for batch, position in train_batches(data, Position(), 1000):
            for row, segments in zip(batch.src_ids, batch.src_segments, strict=True):
                for segment in range(1, segments.max() + 1):
                    ids = row[segments == segment]
                    found[position.epoch][tokenizer.decode(ids)] = tuple(ids.tolist())
            if position == (1, 100):
                return found
        raise AssertionError

    one, again, other = pieces(0), pieces(0), pieces(1)
    assert one == again
    for a, b in ((one[0], one[1]), (one[0], other[0])):
        assert a.keys() == b.keys() == {p.source for p in PAIRS}
        assert sum(a[text] != b[text] for text in a) > 30


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
