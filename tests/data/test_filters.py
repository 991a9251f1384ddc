"""What is trained on: limits, counts and repeats, against loops."""

from collections import Counter

import numpy as np
import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import filters
from transformer_jax.data.filters import Marks, hash_pairs, keep, repeats_of


def marks(lengths: list[list[int]], identical: str = "", repeated: str = "") -> Marks:
    flags = (
        np.array([c == "x" for c in text.ljust(len(lengths))]) for text in (identical, repeated)
    )
    return Marks(np.array(lengths), *flags)


def test_keep_counts_each_dropped_pair_once():
    """Bug: F35: pairs vanish uncounted, or count under two reasons; the limit is off by one."""
    lengths = [[1, 5], [5, 1], [1, 1], [8, 9], [9, 8], [8, 8], [1, 99], [2, 2]]
    config = DataConfig(max_source_tokens=8, max_target_tokens=8)
    kept, dropped = keep(marks(lengths, identical="xxxxxxxx", repeated="xxxxxxxx"), config)
    assert kept.tolist() == [False] * 5 + [True, False, True]
    assert {reason: count for reason, count in dropped.items() if count} == {
        "empty": 4,
        "too long": 2,
    }
    assert kept.sum() + sum(dropped.values()) == len(lengths)


def test_keep_has_a_limit_for_each_side():
    """Bug: the source limit is applied to the target."""
    config = DataConfig(max_source_tokens=5, max_target_tokens=10)
    assert keep(marks([[5, 10], [10, 5]]), config)[0].tolist() == [True, False]


def test_every_filter_by_the_first_reason():
    """Bug: a filter that is never asked, is on by itself, or drops one side only."""
    lengths = [[4, 4], [4, 8], [4, 9], [9, 4], [4, 4], [4, 4], [4, 4], [40, 4]]
    given = marks(lengths, identical="    xx  ", repeated="     xx ")
    config = DataConfig(
        max_source_tokens=20, max_length_ratio=2.0, drop_identical=True, drop_duplicates=True
    )
    kept, dropped = keep(given, config)
    assert kept.tolist() == [True, True] + [False] * 6
    assert dropped == {
        "empty": 0,
        "too long": 1,
        "length ratio": 2,
        "identical": 2,
        "duplicates": 1,
    }
    assert keep(given, DataConfig())[0].all()


def test_text_of_a_language_model_has_no_source_to_be_empty():
    """Bug: all text of a decoder-only model is dropped as empty, or by its ratio."""
    kept, _ = keep(marks([[0, 5], [0, 1]]), DataConfig(max_length_ratio=3.0))
    assert kept.tolist() == [True, False]


@pytest.mark.parametrize("partition", [1, 7, 1000])
def test_repeats_are_all_but_the_first(partition: int, monkeypatch: pytest.MonkeyPatch):
    """Bug: the first of equal pairs is dropped too, or a repeat in another part is missed."""
    monkeypatch.setattr(filters, "_PARTITION", partition)
    hashes = np.random.default_rng(0).integers(0, 20, 100).astype(np.uint64)
    seen, expected = set(), []
    for h in hashes.tolist():
        expected.append(h in seen)
        seen.add(h)
    assert repeats_of(hashes).tolist() == expected
    assert repeats_of(hashes[:0]).tolist() == []


def test_hashes_tell_pairs_apart():
    """Bug: an order of tokens, the border between the sides or a length does not count, and pairs
    that only look alike are dropped as duplicates."""
    pairs = [
        ([a, b][:n], [c, d][:m])
        for a in range(4)
        for b in range(4)
        for c in range(4)
        for d in range(4)
        for n in (0, 1, 2)
        for m in (1, 2)
    ]
    flat = tuple(np.array([i for pair in pairs for i in pair[side]]) for side in (0, 1))
    counts = tuple(np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
    hashes = hash_pairs(flat, counts).tolist()
    by_pair = {}
    for (source, target), h in zip(pairs, hashes, strict=True):
        assert by_pair.setdefault((tuple(source), tuple(target)), h) == h
    assert max(Counter(by_pair.values()).values()) == 1
