"""How pairs share rows: best fit, both sides at once, and the row shapes that leave least room."""

import numpy as np

from transformer_jax.data.batching import Bucket, choose_buckets, room_of

_SAMPLE = 2000  # pairs on which shapes are tried


def pack(
    lengths: np.ndarray, shapes: np.ndarray, pairs_per_row: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Put pairs into rows: the longest first, each into the row where the least room remains.

    A pair that fits nowhere opens a row of the smallest shape that holds it.

    Args:
        lengths: int [pairs, 2], tokens of source and target.
        shapes: int [shapes, 2], ascending; the last holds every pair.
        pairs_per_row: at most so many; 0: as many as fit.

    Returns:
        int64 [pairs], the row of each pair; int64 [rows], the shape of each row.
    """
    opens = (lengths[:, None, :] <= shapes).all(2).argmax(1)  # the shape that a pair would open
    if pairs_per_row == 1:
        return np.arange(len(lengths)), opens
    total = lengths.sum(1)
    order = np.argsort(-total, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    shape_of: list[int] = []
    # Room of the rows that are still open, side by side; those too full for any pair go.
    source, target, held, number = (np.zeros(len(lengths), np.int64) for _ in range(4))
    most = pairs_per_row or len(lengths)
    least = lengths.min(0, initial=1 << 30)
    count, checked = 0, 256
    room = np.empty(len(lengths), np.int64)
    never = 1 << 40
    for pair, (s, t), shape in zip(
        order.tolist(), lengths[order].tolist(), opens[order].tolist(), strict=True
    ):
        free = np.add(source[:count], target[:count], out=room[:count])
        free[(source[:count] < s) | (target[:count] < t)] = never
        row = int(free.argmin()) if count else 0
        if not count or free[row] == never:
            row, count = count, count + 1
            number[row], held[row] = len(shape_of), 0
            source[row], target[row] = shapes[shape]
            shape_of.append(shape)
        source[row] -= s
        target[row] -= t
        held[row] += 1
        row_of[pair] = number[row]
        if held[row] == most:
            source[row] = -1
        if count > checked:
            useful = (source[:count] >= least[0]) & (target[:count] >= least[1])
            kept = int(useful.sum())
            for array in (source, target, held, number):
                array[:kept] = array[:count][useful]
            count, checked = kept, max(256, 2 * kept)
    return row_of, np.asarray(shape_of, np.int64)


def shared_shapes(
    lengths: np.ndarray, count: int, batch_tokens: int, row_multiple: int, pairs_per_row: int
) -> list[Bucket]:
    """At most `count` shapes, no longer than the longest pair, that shared rows fill best.

    Good edges for one pair a row, and for the sums of a few, are tried on a sample; of shapes that
    do about as well, the fewest are taken, since each is compiled.
    """
    rows = len(lengths)
    sample = lengths[np.arange(min(rows, _SAMPLE)) * rows // min(rows, _SAMPLE)]
    longest = lengths.max(0)
    counts = sorted({1, 2, 4, count} & set(range(1, count + 1)))
    best: tuple[float, list[Bucket]] = (-1.0, [])
    for group in range(1, 5):
        if pairs_per_row and group > pairs_per_row:
            continue
        whole = len(sample) // group * group
        scattered = np.random.default_rng(0).permutation(len(sample))[:whole]
        sums = sample[scattered].reshape(-1, group, 2).sum(1)
        sums = np.concatenate([sums[(sums <= longest).all(1)], longest[None]])
        for shapes in counts:
            buckets = choose_buckets(sums, shapes, batch_tokens, row_multiple)
            sizes = np.array([bucket[1:] for bucket in buckets])
            _, shape_of = pack(sample, sizes, pairs_per_row)
            fill = sample.sum() / sizes[shape_of].sum() - 0.005 * len(buckets)
            if fill > best[0]:
                best = fill, buckets
    return best[1]


def packed_shape(lengths: np.ndarray, length: int, batch_tokens: int, row_multiple: int) -> Bucket:
    """The one shape of packed rows: `length` on the side that is longer on average, the other in
    proportion, and neither shorter than the longest pair."""
    mean = np.maximum(lengths.mean(0), 1e-9)
    sides = np.maximum(np.round(length * mean / mean.max()).astype(int), lengths.max(0))
    source, target = (int(side) for side in sides)
    return Bucket(room_of(batch_tokens, max(source, target), row_multiple), source, target)
