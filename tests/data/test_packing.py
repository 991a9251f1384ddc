"""Pairs that share rows, against loops and bounds."""

import numpy as np
import pytest

from transformer_jax.data.batching import Bucket
from transformer_jax.data.packing import pack, packed_shape, shared_shapes


def captions(count: int, seed: int = 0, mean: float = 15.0) -> np.ndarray:
    """Lengths like those of real text: skewed, both sides alike."""
    draw = np.random.default_rng(seed)
    source = np.clip(np.rint(draw.gamma(8, mean / 8, count)), 2, 60)
    target = np.clip(np.rint(source * draw.normal(1.05, 0.15, count)), 2, 60)
    return np.stack([source, target], 1).astype(int)


def best_fit(lengths: np.ndarray, shapes: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """The rule, written out."""
    rows: list[list] = []
    row_of = [-1] * len(lengths)
    for pair in sorted(range(len(lengths)), key=lambda i: (-lengths[i].sum(), i)):
        s, t = lengths[pair].tolist()
        fits = [
            (a + b - s - t, i)
            for i, (a, b, held, _) in enumerate(rows)
            if a >= s and b >= t and held < most
        ]
        if not fits:
            shape = next(i for i, (a, b) in enumerate(shapes) if a >= s and b >= t)
            rows.append([*shapes[shape].tolist(), 0, shape])
        row = min(fits)[1] if fits else len(rows) - 1
        rows[row][:3] = rows[row][0] - s, rows[row][1] - t, rows[row][2] + 1
        row_of[pair] = row
    return row_of, [row[3] for row in rows]


@pytest.mark.parametrize("most", [1, 2, 3, 0])
@pytest.mark.parametrize("shapes", [[[60, 60]], [[20, 20], [60, 60]], [[130, 120]]])
def test_best_fit_against_a_loop(shapes: list, most: int):
    """Bug: a row is closed while a pair would fit, or holds more than it has room for."""
    sizes = np.array(shapes)
    lengths = captions(700)
    row_of, shape_of = pack(lengths, sizes, most)
    for row, shape in enumerate(shape_of):
        held = lengths[row_of == row]
        assert 0 < len(held) <= (most or 1000) and (held.sum(0) <= sizes[shape]).all()
    if most != 1:  # rows of one are numbered as the pairs are
        expected = best_fit(lengths, sizes, most or 1000)
        slots = [sizes[np.array(kinds)].sum() for kinds in (shape_of.tolist(), expected[1])]
        assert slots[0] == slots[1]
        assert sorted(np.bincount(row_of).tolist()) == sorted(np.bincount(expected[0]).tolist())


def test_no_pairs_and_one_pair():
    """Bug: an empty window at the end of an epoch crashes."""
    assert [x.tolist() for x in pack(np.zeros((0, 2), int), np.array([[4, 4]]))] == [[], []]
    assert [x.tolist() for x in pack(np.array([[4, 1]]), np.array([[2, 2], [4, 4]]))] == [[0], [1]]


def test_sources_of_a_language_model_are_empty():
    """Bug: pairs without a source fill a row for ever."""
    lengths = np.array([[0, 5]] * 7)
    row_of, _ = pack(lengths, np.array([[0, 10]]))
    assert sorted(np.bincount(row_of).tolist()) == [1, 2, 2, 2]


@pytest.mark.parametrize("mean", [8.0, 15.0, 30.0])
def test_shapes_leave_little_room(mean: float):
    """Bug: shapes come from a rule that suits one corpus, or more are compiled than allowed."""
    lengths = captions(4000, mean=mean)
    for count in (1, 2, 8):
        buckets = shared_shapes(lengths, count, 4096, 8, 0)
        assert 1 <= len(buckets) <= count
        assert buckets[-1][1:] == tuple(lengths.max(0)), "the longest pair fits, and nothing more"
        sizes = np.array([b[1:] for b in buckets])
        fill = lengths.sum() / sizes[pack(lengths, sizes)[1]].sum()
        assert fill > 0.86
    packed = packed_shape(lengths, 128, 4096, 8)
    fill = lengths.sum() / np.array([packed[1:]])[pack(lengths, np.array([packed[1:]]))[1]].sum()
    assert fill > 0.95


def test_the_packed_shape_by_hand():
    """Bug: both sides get the same slots although one side is longer; a long pair does not fit."""
    lengths = np.array([[10, 20]] * 9 + [[30, 20]])
    assert packed_shape(lengths, 100, 1000, 8) == Bucket(8, 60, 100)
    assert packed_shape(lengths, 40, 1000, 8) == Bucket(24, 30, 40)
