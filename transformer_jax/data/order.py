"""The order of examples: a pure function of (seed, epoch), computed piece by piece.

Nothing of the size of the corpus is stored, so that any stretch of any epoch costs the same.
"""

from collections.abc import Sequence

import numpy as np

_ROUNDS = 6


def permuted(places: np.ndarray, size: int, key: Sequence[int]) -> np.ndarray:
    """Where a pseudo-random permutation of 0 to size - 1 sends some places.

    A Feistel network on the smallest square power of two that holds `size`; what falls outside is
    sent on until it falls inside (Black and Rogaway, 2002, "cycle walking").

    Args:
        places: int64 [n], each below size.
        size: how many are permuted.
        key: numbers of 0 or more that choose the permutation.

    Returns:
        int64 [n], each below size, all different.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (scatter(right ^ round_key) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def scatter(x: np.ndarray) -> np.ndarray:
    """A bijection of uint64 numbers without visible pattern: SplitMix64 (Steele et al., 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def repeats(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Examples of each part in one epoch, so that they stand in the ratio of the shares.

    The part that is repeated least comes exactly once, the others as often as their shares say:
    nothing is left out.

    Args:
        sizes: examples of each part; one without any has no share.
        shares: positive, any scale.
    """
    rates = [share / size if size else np.inf for size, share in zip(sizes, shares, strict=True)]
    least = min(rates)
    return [n and max(n, round(n * rate / least)) for n, rate in zip(sizes, rates, strict=True)]


class EpochOrder:
    """Which example stands at each place of each epoch of a mixture.

    A part that an epoch takes more examples from than it has is gone through again and again,
    each time in another order, and the next epoch goes on where this one stopped.

    Args:
        sizes: examples of each part; they are numbered through, part after part.
        counts: examples of each part in one epoch, from repeats().
        seed: chooses all orders.
    """

    def __init__(self, sizes: Sequence[int], counts: Sequence[int], seed: int) -> None:
        self._sizes, self.counts, self._seed = list(sizes), list(counts), seed
        self._first = np.cumsum([0, *sizes])  # number of the first example of each part
        self._ends = np.cumsum(counts)
        self.size = int(self._ends[-1])

    def numbers(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The examples at places `start` to `stop` of an epoch, int64 [stop - start]."""
        places = permuted(np.arange(start, stop), self.size, (self._seed, epoch))
        part = np.searchsorted(self._ends, places, side="right")
        for i, (size, count) in enumerate(zip(self._sizes, self.counts, strict=True)):
            mine = part == i
            taken = places[mine] - (self._ends[i] - count)
            if count != size:
                taken = self._again(i, epoch * count + taken)
            places[mine] = self._first[i] + taken
        return places

    def _again(self, part: int, running: np.ndarray) -> np.ndarray:
        """Examples of a part that is gone through again and again, by their running number."""
        passes, taken = np.divmod(running, self._sizes[part])
        for number in np.unique(passes):
            mine = passes == number
            key = (self._seed, int(number), 1 + part)
            taken[mine] = permuted(taken[mine], self._sizes[part], key)
        return taken
