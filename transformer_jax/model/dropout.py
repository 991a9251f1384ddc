"""Dropout (section 5.4) whose bits depend on where an element stands, not on how it is computed.

An element is dropped or kept by a hash of (seed, step, site, row in the global batch, place in the
row). So any mesh and any split into micro-batches drop the same elements, and the bits fuse into
the multiplication: nothing is generated ahead, stored, or kept for the backward pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class DropoutKey(NamedTuple):
    """What decides the bits at one place of the model."""

    seed: jax.Array  # uint32 []
    first_row: jax.Array | int = 0  # row of the global batch at which this batch begins

    def fold(self, site: int | jax.Array) -> "DropoutKey":
        """The key of one place below this one; different sites draw unrelated bits."""
        site = jnp.asarray(site, jnp.uint32)
        return self._replace(seed=_mix(self.seed + _mix(site + jnp.uint32(0x9E3779B9))))


def dropout_key(seed: int | jax.Array, step: int | jax.Array) -> DropoutKey:
    """The key of one update: a pure function of the run's seed and the step."""
    return DropoutKey(jnp.asarray(seed, jnp.uint32)).fold(jnp.asarray(step, jnp.uint32))


def dropout(x: jax.Array, rate: float, key: DropoutKey | None) -> jax.Array:
    """Zero each element with probability `rate`, scale the others by 1 / (1 - rate).

    Args:
        x: [B, ...], the global batch first.
        rate: probability, 0 <= rate < 1.
        key: None: x is returned unchanged (evaluation and decoding).
    """
    return dropout_block(x, rate, key, (0,) * (x.ndim - 1), x.shape[1:])


def dropout_block(
    x: jax.Array,
    rate: float,
    key: DropoutKey | None,
    starts: tuple[jax.Array | int, ...],
    whole: tuple[int, ...],
) -> jax.Array:
    """Dropout of a block, with the bits that it has as part of the whole array.

    Args:
        x: [B, ...], all rows, but only a block of each further axis.
        rate: probability, 0 <= rate < 1.
        key: None: x is returned unchanged.
        starts: where the block begins on each axis after the first.
        whole: sizes of these axes in the whole array.
    """
    if key is None or rate == 0.0:
        return x
    keep = 1.0 - rate
    threshold = jnp.uint32(min(round(keep * 2**32), 2**32 - 1))
    bits = random_bits(x.shape, key, starts, whole)
    return jnp.where(bits < threshold, x * (1.0 / keep), jnp.zeros_like(x))


def random_bits(
    shape: tuple[int, ...],
    key: DropoutKey,
    starts: tuple[jax.Array | int, ...] | None = None,
    whole: tuple[int, ...] | None = None,
) -> jax.Array:
    """uint32 [B, ...]: one 32-bit word for each element; starts and whole as in dropout_block.

    Each row has two hashed words of its own; one enters before and one inside the mixing of the
    element's place, so that rows are not shifted or permuted copies of one another.
    """
    starts, whole = starts or (0,) * (len(shape) - 1), whole or shape[1:]
    row_shape = shape[:1] + (1,) * (len(shape) - 1)
    row = lax.broadcasted_iota(jnp.uint32, row_shape, 0) + jnp.asarray(key.first_row, jnp.uint32)
    first = _mix(row ^ key.seed)
    second = _mix(first + jnp.uint32(0x85EBCA6B))
    place = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in range(len(shape) - 1, 0, -1):
        along = lax.broadcasted_iota(jnp.uint32, shape, axis)
        along += jnp.asarray(starts[axis - 1], jnp.uint32)
        place += along * jnp.uint32(stride % 2**32)
        stride *= whole[axis - 1]
    return _mix(place + first, second)


def _mix(x: jax.Array, second: jax.Array | int = 0) -> jax.Array:
    """A bijection of 32-bit words in which each input bit flips half of the output bits."""
    x ^= x >> 16
    x *= jnp.uint32(0x7FEB352D)
    x ^= second
    x ^= x >> 15
    x *= jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
