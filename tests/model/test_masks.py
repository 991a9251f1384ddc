"""Masks drawn in full: a slip in an axis or a comparison changes a picture here."""

import numpy as np

from transformer_jax.model.masks import Mask, segment_mask


def picture(mask) -> list[str]:
    """[Q, M] as rows of x (may attend) and . (may not)."""
    return ["".join("x" if cell else "." for cell in row) for row in np.asarray(mask)]


def test_causal_mask_is_the_lower_triangle():
    """Bug: the wrong triangle, or one that hides the own position."""
    mask = Mask(causal=True).dense(4, 4)
    assert mask.shape == (1, 1, 4, 4)
    assert mask.dtype == bool
    assert picture(mask[0, 0]) == ["x...", "xx..", "xxx.", "xxxx"]


def test_causal_mask_of_one_position():
    """Bug: an empty mask at length 1, where a decode step lives."""
    assert picture(Mask(causal=True).dense(1, 1)[0, 0]) == ["x"]


def test_cross_mask_has_queries_first_and_memory_last():
    """Bug (F58): the mask is built from target padding, or its last two axes are exchanged."""
    target, source = np.asarray([[1, 1, 0]]), np.asarray([[1, 1, 1, 1, 1, 0, 0]])
    mask = segment_mask(target, source)
    assert mask.shape == (1, 1, 3, 7)
    assert mask.dtype == bool
    assert picture(mask[0, 0]) == ["xxxxx..", "xxxxx..", "......."]
    assert picture(segment_mask(source, target)[0, 0]) == ["xx."] * 5 + ["..."] * 2


def test_padding_never_sees_padding():
    """Bug: segment 0 equals segment 0, so padding attends to padding and rows grow values."""
    mask = segment_mask(np.zeros((2, 3), int), np.zeros((2, 5), int))
    assert not np.asarray(mask).any()


def test_packed_sentences_see_only_their_own_segment():
    """Bug: a sentence of a packed row attends to its neighbour."""
    segments = np.asarray([[1, 1, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1]])
    first, second = segment_mask(segments, segments)[:, 0]
    assert picture(first) == ["xx....", "xx....", "..x...", "...xx.", "...xx.", "......"]
    assert picture(second) == ["xxxxxx"] * 6
    both = Mask(segments, segments, causal=True).dense(6, 6)
    assert both.dtype == bool  # masks are combined as booleans (F39), never added as numbers
    assert picture(both[0, 0]) == ["x.....", "xx....", "..x...", "...x..", "...xx.", "......"]


def test_rows_of_a_batch_have_masks_of_their_own():
    """Bug: the mask of row 0 is broadcast over the batch."""
    source = np.asarray([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 0, 0]])
    mask = segment_mask(np.ones((4, 2), int), source)
    assert [picture(row[0]) for row in np.asarray(mask)] == [
        ["x..", "x.."],
        ["xx.", "xx."],
        ["xxx", "xxx"],
        ["...", "..."],
    ]
