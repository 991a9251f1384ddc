"""Which pairs stand in which batch, against brute force and loops."""

import itertools
from collections import Counter

import numpy as np
import pytest

from transformer_jax.data.batching import (
    Bucket,
    Encoded,
    choose_buckets,
    collate,
    in_buckets,
    room_of,
)
from transformer_jax.data.tokenizer import EOS, START

# Names of corpora for random_lengths.
SHAPES = ("alike", "source longer", "target longer", "mixed", "one length")


def random_lengths(shape: str, count: int, seed: int, longest: int = 30) -> np.ndarray:
    """int [count, 2], at least 2."""
    draw = np.random.default_rng(seed)
    source = draw.integers(2, longest, count)
    target = {
        "alike": np.clip(source + draw.integers(-2, 3, count), 2, longest),
        "source longer": np.maximum(2, source // 2),
        "target longer": source + draw.integers(0, longest, count),
        "mixed": draw.integers(2, longest, count),
        "one length": np.full(count, 7),
    }[shape]
    return np.stack([np.full(count, 7) if shape == "one length" else source, target], 1)


def encode(lengths: np.ndarray, seed: int = 0) -> Encoded:
    """Random ids of given lengths, EOS last."""
    draw = np.random.default_rng(seed)
    sides = []
    for side in (0, 1):
        sentences = [[*draw.integers(4, 50, n - 1), EOS] for n in lengths[:, side]]
        sides += [np.concatenate(sentences).astype(np.int32)]
        sides += [np.cumsum([0, *lengths[:, side]])]
    return Encoded(*sides)


# ---- choose_buckets -----------------------------------------------------------------------------


def slots_of(lengths: np.ndarray, buckets: list[Bucket]) -> int:
    """Slots that all pairs take, each in the first bucket that holds it."""
    total = 0
    for source, target in lengths:
        fits = (b for b in buckets if source <= b.src_length and target <= b.tgt_length)
        bucket = next(fits)
        total += bucket.src_length + bucket.tgt_length
    return total


def least_slots(lengths: np.ndarray, count: int) -> int:
    """The least over all ways to cut the order by the longer side into at most `count` buckets."""
    longer = lengths.max(1)
    best = None
    for cuts in range(count):
        for edges in itertools.combinations(np.unique(longer)[:-1], cuts):
            total, before = 0, 0
            for edge in (*edges, longer.max()):
                up_to = lengths[longer <= edge]
                total += (len(up_to) - before) * up_to.max(0).sum()
                before = len(up_to)
            best = total if best is None else min(best, total)
    return int(best)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_buckets_leave_the_least_padding(shape: str, count: int):
    """Bug: the dynamic programme cuts in the wrong place, or overlooks a cut at either end."""
    for seed in range(8):
        lengths = random_lengths(shape, 40, seed, longest=14)
        buckets = choose_buckets(lengths, count, 64)
        assert 1 <= len(buckets) <= count
        assert slots_of(lengths, buckets) == least_slots(lengths, count)


def test_bucket_edges_by_hand():
    """Bug: edges stand at even distances instead of where the data are."""
    lengths = np.repeat([[3, 3], [4, 4], [9, 9], [10, 10], [30, 30]], [50, 1, 40, 9, 5], axis=0)
    buckets = choose_buckets(lengths, 3, 60)
    assert buckets == [Bucket(20, 3, 3), Bucket(6, 10, 10), Bucket(2, 30, 30)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row_multiple", [1, 2, 8])
def test_buckets_are_nested_and_within_the_budget(shape: str, row_multiple: int):
    """Bug: a left-over pair moves up into a bucket that is narrower on one side, and is cut; rows
    do not divide among the devices."""
    lengths = random_lengths(shape, 300, 1)
    buckets = choose_buckets(lengths, 5, 500, row_multiple)
    for narrow, wide in itertools.pairwise(buckets):
        assert narrow.src_length <= wide.src_length and narrow.tgt_length <= wide.tgt_length
        assert narrow[1:] != wide[1:]
    assert buckets[-1][1:] == tuple(lengths.max(0))
    for bucket in buckets:
        longest = max(bucket.src_length, bucket.tgt_length)
        assert bucket.rows % row_multiple == 0, "all fit at least 8 times"
        assert bucket.rows * longest <= 500 < (bucket.rows + row_multiple) * longest


@pytest.mark.parametrize("row_multiple", [1, 3, 8, 64])
def test_rows_never_exceed_the_budget(row_multiple: int):
    """Bug: F114: rows are rounded up to the devices, over what the user allowed."""
    for tokens in (1, 5, 64, 500, 4096):
        for longest in (1, 2, 7, 60, 500):
            rows = room_of(tokens, longest, row_multiple)
            assert rows == 1 or rows * longest <= tokens
            assert rows % row_multiple == 0 or (
                row_multiple * longest > tokens and rows & (rows - 1) == 0
            )
            assert (rows + max(row_multiple, rows)) * longest > tokens, "room is left unused"


def test_the_longest_target_may_have_a_short_source():
    """Bug: the widest bucket does not hold all sources, and the run dies at its start."""
    lengths = np.array([[10, 3]] * 5 + [[5, 15]] * 5)
    buckets = choose_buckets(lengths, 2, 64)
    assert sum(len(pairs) for _, pairs in in_buckets(lengths, buckets)) == 10


def test_fewer_lengths_than_buckets():
    """Bug: empty or repeated buckets, each of which would be compiled."""
    assert choose_buckets(np.array([[7, 7]] * 9), 8, 70) == [Bucket(10, 7, 7)]
    assert choose_buckets(np.array([[2, 2], [3, 3]]), 8, 6) == [Bucket(3, 2, 2), Bucket(2, 3, 3)]


# ---- in_buckets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 37, 500])
def test_buckets_hold_each_pair_once(shape: str, count: int):
    """Bug: F115: the last pairs of a bucket are dropped, a pair comes twice, or one is cut."""
    lengths = random_lengths(shape, count, 5)
    batches = list(in_buckets(lengths, choose_buckets(lengths, 4, 200)))
    seen = Counter(np.concatenate([pairs for _, pairs in batches]).tolist())
    assert seen == Counter(range(count))
    short = [pairs for bucket, pairs in batches if len(pairs) != bucket.rows]
    assert len(short) <= 1, "only one batch has filler"
    for bucket, pairs in batches:
        assert 0 < len(pairs) <= bucket.rows
        assert (lengths[pairs] <= bucket[1:]).all(), "no pair is cut"


# ---- collate ------------------------------------------------------------------------------------


def test_collate_against_a_loop():
    """Bug: targets shifted by two, padding with weight, ids of a neighbour behind a sentence."""
    lengths = random_lengths("mixed", 30, 2)
    encoded = encode(lengths)
    source, target = lengths.max(0).tolist()
    pairs = np.array([4, 29, 0, 4])
    batch = collate(encoded, Bucket(6, source + 2, target + 3), pairs)
    expected = np.zeros((5, 6, max(source + 2, target + 3)), np.int32)
    for row, pair in enumerate(pairs):
        src = encoded.src_ids[encoded.src_ends[pair] : encoded.src_ends[pair + 1]]
        tgt = encoded.tgt_ids[encoded.tgt_ends[pair] : encoded.tgt_ends[pair + 1]]
        for i, token in enumerate(src):
            expected[0, row, i], expected[1, row, i] = token, 1
        for i, token in enumerate(tgt):
            expected[2, row, i] = START if i == 0 else tgt[i - 1]
            expected[3, row, i], expected[4, row, i] = token, 1
    for got, want, width in zip(batch, expected, [source + 2] * 2 + [target + 3] * 3, strict=False):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want[:, :width])
    assert batch.src_positions is None and batch.tgt_positions is None


def test_collate_of_shared_rows_against_a_loop():
    """Bug: pairs of a row overlap, the start id is missing inside a row, a target sees the last id
    of its neighbour, positions run on, or segments of the two sides do not answer each other."""
    lengths = random_lengths("mixed", 30, 3)
    lengths[3] = (5, 9)
    encoded = encode(lengths)
    pairs, rows = np.array([4, 29, 3, 7, 1, 4]), np.array([0, 0, 0, 2, 2, 3])
    shape = Bucket(5, 100, 110)
    batch = collate(encoded, shape, pairs, rows)
    want = [np.zeros((5, n), np.int32) for n in (100, 100, 110, 110, 110, 100, 110)]
    for row in range(5):
        source = target = 0
        for segment, pair in enumerate(pairs[rows == row], 1):
            src = encoded.src_ids[encoded.src_ends[pair] : encoded.src_ends[pair + 1]]
            tgt = encoded.tgt_ids[encoded.tgt_ends[pair] : encoded.tgt_ends[pair + 1]]
            for i, token in enumerate(src):
                for array, value in ((0, token), (1, segment), (5, i)):
                    want[array][row, source + i] = value
            for i, token in enumerate(tgt):
                before = START if i == 0 else tgt[i - 1]
                for array, value in ((2, before), (3, token), (4, segment), (6, i)):
                    want[array][row, target + i] = value
            source, target = source + len(src), target + len(tgt)
    for got, expected in zip(batch, want, strict=True):
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)


def test_collate_of_no_pairs_is_filler():
    """Bug: a process whose share of the last batch is empty crashes, and the others wait."""
    encoded = encode(random_lengths("mixed", 3, 0))
    for rows in (None, np.zeros(0, np.int64)):
        batch = collate(encoded, Bucket(2, 8, 9), np.zeros(0, np.int64), rows)
        assert batch.src_ids.shape == (2, 8) and batch.tgt_out_ids.shape == (2, 9)
        assert not any(x.any() for x in batch if x is not None)


def test_collate_of_the_last_pair_reads_nothing_beyond():
    """Bug: an index past the flat array of ids at the end of the corpus."""
    encoded = encode(np.array([[2, 2], [3, 4]]))
    batch = collate(encoded, Bucket(1, 9, 9), np.array([1]))
    assert batch.src_ids[0].tolist() == [*encoded.src_ids[2:], *[0] * 6]
    assert batch.tgt_out_ids[0].tolist() == [*encoded.tgt_ids[2:], *[0] * 5]
    assert batch.tgt_in_ids[0].tolist() == [START, *encoded.tgt_ids[2:-1], *[0] * 5]


def test_lengths_of_encoded():
    """Bug: source and target lengths change places."""
    lengths = random_lengths("mixed", 12, 0)
    np.testing.assert_array_equal(encode(lengths).lengths, lengths)
