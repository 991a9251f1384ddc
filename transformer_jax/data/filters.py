"""Which pairs to train on. A pair goes as a whole, by one function, and is counted."""

from typing import NamedTuple

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.order import scatter

REASONS: tuple[str, ...] = ("empty", "too long", "length ratio", "identical", "duplicates")
_PARTITION = 1 << 22  # hashes that are sorted at a time


class Marks(NamedTuple):
    """What the filters know of each pair."""

    lengths: np.ndarray  # int [pairs, 2], EOS included
    identical: np.ndarray  # bool [pairs]: both sides have the same text
    repeated: np.ndarray  # bool [pairs]: the same ids came before


def keep(marks: Marks, config: DataConfig) -> tuple[np.ndarray, dict[str, int]]:
    """Which pairs to train on, by the first reason that holds; evaluation data never comes here.

    Args:
        marks: of some pairs. A source of length 0 is text for a language model, not empty.
        config: the limits; a filter that is off drops nothing.

    Returns:
        bool [pairs], and how many were dropped for each of REASONS.
    """
    source, target = marks.lengths.T
    limits = (config.max_source_tokens, config.max_target_tokens)
    ratio = np.maximum(source, target) > config.max_length_ratio * np.minimum(source, target)
    holds = (
        (source == 1) | (target <= 1),
        (marks.lengths > limits).any(1),
        ratio & (config.max_length_ratio > 0) & (source > 0),
        marks.identical & config.drop_identical,
        marks.repeated & config.drop_duplicates,
    )
    kept = np.ones(len(source), bool)
    dropped: dict[str, int] = {}
    for reason, condition in zip(REASONS, holds, strict=True):
        dropped[reason] = int((kept & condition).sum())
        kept &= ~condition
    return kept, dropped


def repeats_of(hashes: np.ndarray) -> np.ndarray:
    """Which hashes came before, bool [n]; sorted part by part, so that memory stays small."""
    repeated = np.zeros(len(hashes), bool)
    parts = -(-len(hashes) // _PARTITION)
    for part in range(parts):
        mine = np.flatnonzero(hashes % np.uint64(parts) == part)
        first = np.unique(hashes[mine], return_index=True)[1]
        later = np.ones(len(mine), bool)
        later[first] = False
        repeated[mine[later]] = True
    return repeated


def hash_pairs(
    ids: tuple[np.ndarray, np.ndarray], lengths: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """A number for each pair that equal pairs of ids share, uint64 [pairs].

    Args:
        ids: the flat ids of each side.
        lengths: int [pairs] of each side.
    """
    total = np.zeros(len(lengths[0]), np.uint64)
    for side, (flat, counts) in enumerate(zip(ids, lengths, strict=True)):
        starts = np.cumsum(counts) - counts
        within = np.arange(len(flat)) - np.repeat(starts, counts)
        tokens = flat.astype(np.uint64) * np.uint64(2) + np.uint64(side)
        spread = scatter(tokens ^ (within.astype(np.uint64) << np.uint64(33)))
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(spread, dtype=np.uint64)])
        total += running[starts + counts] - running[starts]  # modulo 2**64
    return total
