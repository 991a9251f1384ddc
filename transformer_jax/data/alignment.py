"""Stretches of a corpus whose sides are shifted against each other by a line, told by lengths."""

import numpy as np

_EVIDENCE = 6.0  # log odds, beyond what the number of pairs allows for
_CLIP = 1.0  # one odd pair must not decide


def shifted_stretches(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Where the lengths of sources fit those of the next or the last target much better.

    The log of the length ratio strays less for true pairs than for neighbours; by how much, the
    corpus itself says. A stretch is reported if the odds that it is shifted rather than not
    (normal deviations, sequential test of Page, 1954) are high.

    Args:
        lengths: int [pairs, 2], at least 1 where there is text.

    Returns:
        First and last pair of each stretch, counted from 1.
    """
    if len(lengths) < 2:
        return []
    found = _look(np.log(np.maximum(lengths, 1)))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if merged and first <= merged[-1][1] + 1:
            first, last = merged[-1][0], max(last, merged.pop()[1])
        merged.append((first, last))
    return merged


def _look(logs: np.ndarray) -> list[tuple[int, int]]:
    source, target = logs.T
    usual = np.median(target - source)
    strays = np.abs(target - source - usual)
    found = []
    for by in (1, -1):
        other = np.roll(target, -by)
        gain = np.clip(strays - np.abs(other - source - usual), -_CLIP, _CLIP)
        gain[-1 if by == 1 else 0] = 0  # has no such neighbour
        mean, spread = float(gain.mean()), float(gain.std())
        if not spread:
            continue
        if mean * np.sqrt(len(gain)) > _EVIDENCE * spread:
            found.append((1, len(gain)))
            continue
        odds = 2 * abs(mean) / spread**2 * gain
        while True:
            total = np.concatenate([[0.0], np.cumsum(odds)])
            rise = total - np.minimum.accumulate(total)
            end = int(rise.argmax())
            if rise[end] < _EVIDENCE + np.log(len(gain)):
                break
            first = int(total[: end + 1].argmin())
            found.append((first + 1, end))
            odds[first:end] = -1.0
    return found
