"""Shapes of batches, and pairs of ids as rectangular arrays: pure functions of lengths and ids."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from transformer_jax.data.tokenizer import START
from transformer_jax.types import Batch


class Encoded(NamedTuple):
    """All pairs as ids, EOS last: two flat arrays and where each sentence ends.

    Text for a language model has sources of length 0, without EOS.
    """

    src_ids: np.ndarray  # int32 or uint16 [sum of source lengths]
    src_ends: np.ndarray  # int64 [pairs + 1], first 0
    tgt_ids: np.ndarray  # int32 or uint16 [sum of target lengths]
    tgt_ends: np.ndarray  # int64 [pairs + 1]
    start: int = START  # what the decoder's input begins with

    @property
    def lengths(self) -> np.ndarray:
        """int64 [pairs, 2]: tokens of source and target, EOS included."""
        return np.stack([np.diff(self.src_ends), np.diff(self.tgt_ends)], 1)

    def lengths_of(self, pairs: np.ndarray) -> np.ndarray:
        """int64 [n, 2]: tokens of some pairs."""
        sides = (ends[pairs + 1] - ends[pairs] for ends in (self.src_ends, self.tgt_ends))
        return np.stack(list(sides), 1)


class Bucket(NamedTuple):
    """One batch shape."""

    rows: int
    src_length: int
    tgt_length: int


def room_of(batch_tokens: int, longest: int, row_multiple: int) -> int:
    """Rows of a batch: as many as fit, in multiples of row_multiple; fewer than that, if no more
    fit, in a power of two."""
    rows = max(1, batch_tokens // longest)
    if rows >= row_multiple:
        return rows // row_multiple * row_multiple
    return 1 << (rows.bit_length() - 1)


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
        row_multiple: rows are a multiple of this, where so many fit.
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
        rows = room_of(batch_tokens, max(source, target), row_multiple)
        buckets.append(Bucket(rows, source, target))
    return buckets


def in_buckets(lengths: np.ndarray, buckets: list[Bucket]) -> Iterator[tuple[Bucket, np.ndarray]]:
    """All pairs once, one a row, in their order; what is left over moves up to a wider bucket.

    Args:
        lengths: int [pairs, 2].
        buckets: nested, ascending; the last holds every pair.
    """
    edges = np.array([bucket[1:] for bucket in buckets])
    which = (lengths[:, None, :] <= edges).all(2).argmax(1)
    left = np.zeros(0, np.int64)
    for b, bucket in enumerate(buckets):
        left = np.concatenate([left, np.flatnonzero(which == b)])
        full = len(left) // bucket.rows * bucket.rows
        yield from ((bucket, part) for part in left[:full].reshape(-1, bucket.rows))
        left = left[full:]
    if len(left):
        yield buckets[-1], left


def collate(
    encoded: Encoded, bucket: Bucket, pairs: np.ndarray, rows: np.ndarray | None = None
) -> Batch:
    """Rectangular arrays of some pairs; rows beyond them are filler of segment 0.

    Text for a language model has no source arrays.

    Args:
        encoded: where the ids are.
        bucket: the shape.
        pairs: int [n], which pairs.
        rows: int [n], ascending, the row of each; None: one a row, and no positions.
    """
    shared = rows is not None
    rows = np.arange(len(pairs)) if rows is None else rows
    src = _side(encoded.src_ids, encoded.src_ends, pairs, rows, (bucket.rows, bucket.src_length))
    tgt = _side(encoded.tgt_ids, encoded.tgt_ends, pairs, rows, (bucket.rows, bucket.tgt_length))
    positions = (src.positions, tgt.positions) if shared else (None, None)
    in_ids = np.zeros_like(tgt.ids)
    in_ids[:, 1:] = tgt.ids[:, :-1]
    first = (tgt.positions == 0) & (tgt.segments > 0)
    in_ids = np.where(first, encoded.start, in_ids * (tgt.segments > 0)).astype(np.int32)
    batch = Batch(src.ids, src.segments, in_ids, tgt.ids, tgt.segments, *positions)
    if bucket.src_length:
        return batch
    return batch._replace(src_ids=None, src_segments=None, src_positions=None)


class _Side(NamedTuple):
    ids: np.ndarray  # int32 [rows, length], like the others
    segments: np.ndarray
    positions: np.ndarray


def _side(
    flat: np.ndarray, ends: np.ndarray, pairs: np.ndarray, rows: np.ndarray, shape: tuple[int, int]
) -> _Side:
    """One side of a batch. Each token is told where it comes from and where it goes to."""
    starts = ends[pairs]
    lengths = ends[pairs + 1] - starts
    before = np.cumsum(lengths) - lengths
    first = np.searchsorted(rows, rows)  # of the pairs in the same row
    offsets = rows * shape[1] + before - before[first] if len(rows) else before
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    place = np.repeat(offsets, lengths) + within
    ids, segments, positions = (np.zeros(shape[0] * shape[1], np.int32) for _ in range(3))
    ids[place] = flat[np.repeat(starts, lengths) + within]
    segments[place] = np.repeat(np.arange(1, len(rows) + 1) - first, lengths)
    positions[place] = within
    return _Side(*(x.reshape(shape) for x in (ids, segments, positions)))
