"""Where the sides of a corpus are shifted, told by lengths alone."""

import numpy as np
import pytest

from transformer_jax.data.alignment import shifted_stretches


def corpus(count: int, noise: float, seed: int) -> np.ndarray:
    """Lengths of true pairs, whose ratio strays by so much."""
    draw = np.random.default_rng(seed)
    source = draw.gamma(2, 8, count) + 2
    return np.stack([source, source * np.exp(draw.normal(0.1, noise, count))], 1).astype(int) + 1


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.8, 2.0])
def test_true_pairs_are_not_suspected(noise: float):
    """Bug: a warning for every corpus whose lengths say little."""
    for seed in range(40):
        assert shifted_stretches(corpus(300, noise, seed)) == []


@pytest.mark.parametrize("by", [1, -1])
def test_a_shifted_block_is_found_where_it_is(by: int):
    """Bug: F33: a block of pairs is shifted by a line and silently trained on."""
    for seed in range(10):
        lengths = corpus(500, 0.15, seed)
        lengths[200:240, 1] = lengths[200 + by : 240 + by, 1]
        ((first, last),) = shifted_stretches(lengths)
        assert abs(first - 201) <= 6 and abs(last - 240) <= 6


def test_a_whole_file_that_is_shifted():
    """Bug: where everything is shifted, nothing stands out."""
    lengths = corpus(300, 0.15, 0)
    lengths[:, 1] = np.roll(lengths[:, 1], 1)
    assert shifted_stretches(lengths) == [(1, 300)]


@pytest.mark.parametrize(
    "lengths", [np.zeros((0, 2), int), np.ones((1, 2), int), np.full((9, 2), 4)]
)
def test_corpora_without_anything_to_tell(lengths: np.ndarray):
    """Bug: a division by zero for few or equal lengths."""
    assert shifted_stretches(lengths) == []
