"""The order of examples: permutations, mixtures, epochs."""

import itertools
from collections import Counter

import numpy as np
import pytest

from transformer_jax.data.order import EpochOrder, permuted, repeats


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1000, 4096, 5000])
def test_each_number_comes_once(size: int):
    """Bug: F105: the permutation of a size that is no power of four repeats or loses numbers."""
    for key in ((0, 0), (0, 1), (2**31 - 1, 9)):
        found = permuted(np.arange(size), size, key)
        assert sorted(found.tolist()) == list(range(size))
        pieces = [permuted(np.arange(a, min(a + 7, size)), size, key) for a in range(0, size, 7)]
        np.testing.assert_array_equal(np.concatenate(pieces), found)


def test_permutations_look_random():
    """Bug: F107, F121: epochs or seeds repeat each other, or neighbours stay neighbours."""
    n = 1000
    orders = [permuted(np.arange(n), n, key) for key in ((0, 0), (0, 1), (1, 0), (7, 3))]
    for one, two in itertools.combinations(orders, 2):
        assert (one == two).sum() < 12, "by chance about one number stays"
        assert abs(np.corrcoef(one, two)[0, 1]) < 0.12
    for order in orders:
        assert (np.abs(np.diff(order)) == 1).sum() < 12
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.12
    # Where each number lands is even over the whole range: chi-squared over 10 x 10 cells.
    cells = np.zeros((10, 10))
    for key in range(50):
        np.add.at(cells, (np.arange(n) // 100, permuted(np.arange(n), n, (key, 0)) // 100), 1)
    assert ((cells - 500) ** 2 / 500).sum() < 150  # 81 degrees of freedom: 99.99 % are below 135


def test_without_weights_each_example_comes_once():
    """Bug: several files are sampled with replacement."""
    order = EpochOrder([3, 50, 7], [3, 50, 7], seed=1)
    for epoch in range(3):
        assert sorted(order.numbers(epoch, 0, 60).tolist()) == list(range(60))


def test_shares_of_a_mixture():
    """Bug: weights are taken for each source, not for each example; a part is left out."""
    assert repeats([100, 10], [1.0, 1.0]) == [100, 100]
    assert repeats([100, 10], [3.0, 1.0]) == [100, 33]
    assert repeats([100, 10], [100.0, 10.0]) == [100, 10]
    assert repeats([100, 10], [100.0, 1.0]) == [1000, 10]
    assert repeats([100, 0, 10], [1.0, 1.0, 1.0]) == [100, 0, 100]
    assert sorted(EpochOrder([3, 0, 2], [3, 0, 2], 0).numbers(0, 0, 5).tolist()) == [0, 1, 2, 3, 4]


def test_repeated_parts_are_gone_through_evenly():
    """Bug: a fraction of a small part is never seen, since every epoch starts at its beginning."""
    order = EpochOrder([40, 10], [40, 25], seed=5)
    total: Counter[int] = Counter()
    for epoch in range(4):
        found = Counter(order.numbers(epoch, 0, order.size).tolist())
        assert [found[i] for i in range(40)] == [1] * 40
        assert {found[i] for i in range(40, 50)} <= {2, 3}
        total += found
    assert {total[i] for i in range(40, 50)} == {10}


def test_any_stretch_of_any_epoch_alone():
    """Bug: the place in an epoch can be reached only from its beginning."""
    order = EpochOrder([40, 10], [40, 25], seed=5)
    for epoch in (0, 3):
        whole = order.numbers(epoch, 0, 65)
        for start, stop in ((0, 1), (13, 40), (64, 65)):
            np.testing.assert_array_equal(order.numbers(epoch, start, stop), whole[start:stop])
