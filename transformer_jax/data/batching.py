"""Which pairs stand in which batch: pure functions of lengths, seed and epoch.

Batch i of a run is a function of (seed, i) alone, so the position of a run in its data is one
number, its step, and any process can make its share of any batch.
"""

from typing import NamedTuple

import numpy as np

from transformer_jax.data.tokenizer import START
from transformer_jax.types import Batch


class Encoded(NamedTuple):
    """All pairs as ids, EOS last: two flat arrays and where each sentence ends.

    Text for a language model has sources of length 0, without EOS.
    """

    src_ids: np.ndarray  # int32 [sum of source lengths]
    src_ends: np.ndarray  # int64 [pairs + 1], first 0
    tgt_ids: np.ndarray  # int32 [sum of target lengths]
    tgt_ends: np.ndarray  # int64 [pairs + 1]
    start: int = START  # what the decoder's input begins with

    @property
    def lengths(self) -> np.ndarray:
        """int64 [pairs, 2]: tokens of source and target, EOS included."""
        return np.stack([np.diff(self.src_ends), np.diff(self.tgt_ends)], 1)


class Bucket(NamedTuple):
    """One batch shape."""

    rows: int
    src_length: int
    tgt_length: int


def keep(
    lengths: np.ndarray, max_source: int, max_target: int
) -> tuple[np.ndarray, dict[str, int]]:
    """Which pairs to train on: a pair goes as a whole, by the first reason that holds.

    Args:
        lengths: int [pairs, 2], EOS included.
        max_source: longest source allowed.
        max_target: longest target allowed.

    Returns:
        bool [pairs], and how many were dropped for each reason.
    """
    empty = (lengths[:, 0] == 1) | (lengths[:, 1] <= 1)
    too_long = np.any(lengths > (max_source, max_target), axis=1) & ~empty
    return ~(empty | too_long), {"empty": int(empty.sum()), "too long": int(too_long.sum())}


def choose_buckets(
    lengths: np.ndarray, count: int, batch_tokens: int, row_multiple: int = 1
) -> list[Bucket]:
    """At most `count` batch shapes that leave the least padding, source and target together.

    Pairs are ordered by their longer side; dynamic programming over the distinct values finds the
    cuts. Every bucket holds what a narrower one holds, so that left-over pairs can move up, and as
    many rows as fit into batch_tokens on its longer side.

    Args:
        lengths: int [pairs, 2].
        count: number of shapes allowed.
        batch_tokens: slots of one batch on each side.
        row_multiple: rows are a multiple of this (devices that share a batch).
    """
    longer = lengths.max(1)
    edges = np.unique(longer)
    position = np.searchsorted(edges, longer)
    n = len(edges)
    longest = np.zeros((n, 2), np.int64)  # of all pairs up to each distinct value, on each side
    np.maximum.at(longest, position, lengths)
    longest = np.maximum.accumulate(longest)
    # slots[i, j]: slots that the pairs take in a bucket of the distinct values i to j.
    before = np.concatenate([[0], np.cumsum(np.bincount(position, minlength=n))])
    slots = np.full((n, n), np.inf)
    for i in range(n):
        slots[i, i:] = longest[i:].sum(1) * (before[i + 1 :] - before[i])
    best, cut = slots[0].copy(), []
    for _ in range(min(count, n) - 1):
        total = best[:-1, None] + slots[1:, :]  # [last value before the cut, last value]
        cut.append(total.argmin(0))
        best = np.minimum(best, total.min(0))
    ends = [n - 1]
    for choice in reversed(cut):
        if ends[-1] == 0:
            break
        ends.append(int(choice[ends[-1]]))
    buckets = []
    for source, target in longest[sorted(set(ends))].tolist():
        rows = max(1, batch_tokens // max(source, target) // row_multiple) * row_multiple
        buckets.append(Bucket(rows, source, target))
    return buckets


class Plan:
    """The batches of an endless run over one set of pairs.

    Each epoch takes every pair once, in an order of its own. Pairs left over when a bucket is cut
    into full batches move up into the next wider bucket, so that only one batch of an epoch has
    filler rows (weight 0).
    """

    def __init__(self, lengths: np.ndarray, buckets: list[Bucket], seed: int) -> None:
        self.buckets, self._seed = buckets, seed
        fits = np.stack(
            [(lengths <= (b.src_length, b.tgt_length)).all(1) for b in buckets]
        )  # [buckets, pairs]
        if not fits[-1].all():
            raise ValueError("the widest bucket must hold every pair")
        self._bucket_of = fits.argmax(0)
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] = (0, self._order(0))
        self.batches_per_epoch = len(self._epoch[1])

    def _order(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        random = np.random.Generator(np.random.Philox(key=[self._seed, epoch]))
        shuffled = random.permutation(len(self._bucket_of))
        which = self._bucket_of[shuffled]
        batches, left = [], shuffled[:0]
        for b, bucket in enumerate(self.buckets):
            members = np.concatenate([left, shuffled[which == b]])
            full = len(members) // bucket.rows * bucket.rows
            batches += [(b, part) for part in members[:full].reshape(-1, bucket.rows)]
            left = members[full:]
        if len(left):
            batches.append((len(self.buckets) - 1, left))
        return [batches[i] for i in random.permutation(len(batches))]

    def __getitem__(self, index: int) -> tuple[Bucket, np.ndarray]:
        """Shape and pair numbers of batch `index`, counted from the start of the run."""
        epoch, position = divmod(index, self.batches_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        b, pairs = self._epoch[1][position]
        return self.buckets[b], pairs


def collate(encoded: Encoded, bucket: Bucket, pairs: np.ndarray) -> Batch:
    """Rectangular arrays of some pairs; rows beyond them are filler of segment 0.

    Text for a language model has no source arrays.
    """
    src_ids, src_segments = _rows(encoded.src_ids, encoded.src_ends, pairs, bucket.src_length)
    out_ids, tgt_segments = _rows(encoded.tgt_ids, encoded.tgt_ends, pairs, bucket.tgt_length)
    start = np.full((len(pairs), 1), encoded.start, np.int32)
    in_ids = np.concatenate([start, out_ids[:, :-1]], 1) * tgt_segments
    fill = ((0, bucket.rows - len(pairs)), (0, 0))
    arrays = (src_ids, src_segments, in_ids, out_ids, tgt_segments)
    batch = Batch(*(np.pad(x, fill) for x in arrays))
    return batch if bucket.src_length else batch._replace(src_ids=None, src_segments=None)


def _rows(
    flat: np.ndarray, ends: np.ndarray, pairs: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and segments, int32 [len(pairs), length] each."""
    starts, stops = ends[pairs], ends[pairs + 1]
    place = starts[:, None] + np.arange(length)
    real = place < stops[:, None]
    ids = np.where(real, flat[np.minimum(place, len(flat) - 1)], 0)
    return ids.astype(np.int32), real.astype(np.int32)
