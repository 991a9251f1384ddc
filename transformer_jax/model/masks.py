"""Who may attend to whom: booleans, True = may attend, combined by `&`, applied once.

A Mask says it without an array of [Q, M], so that attention can look at it block by block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mask:
    """The rule for one attention.

    A query sees a key if both stand in the same segment, and that is not padding (segment 0); if
    `causal`, only keys at its own position or before; if `window`, only keys less than `window`
    positions away; and if there are `explicit` booleans, only where these say so.
    """

    query_segments: jax.Array | None = None  # int32 [B, Q]; None: no segments
    memory_segments: jax.Array | None = None  # int32 [B, M]
    query_positions: jax.Array | None = None  # int32 [B, Q]; None: 0, 1, 2, ...
    memory_positions: jax.Array | None = None  # int32 [B, M]
    explicit: jax.Array | None = None  # bool, broadcasts to [B, H, Q, M]
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    window: int = dataclasses.field(default=0, metadata={"static": True})

    def dense(self, queries: int, memories: int) -> jax.Array:
        """The whole rule as booleans [B or 1, H or 1, Q, M]."""
        return self.block(0, queries, 0, memories)

    def block(
        self,
        query_start: jax.Array | int,
        queries: int,
        memory_start: jax.Array | int,
        memories: int,
    ) -> jax.Array:
        """The rule for some queries and some keys, bool [B or 1, H or 1, queries, memories]."""
        visible = jnp.ones((1, 1, queries, memories), bool)
        if self.query_segments is not None and self.memory_segments is not None:
            visible &= segment_mask(
                _cut(self.query_segments, query_start, queries),
                _cut(self.memory_segments, memory_start, memories),
            )
        if self.causal or self.window:
            distance = self.distance(query_start, queries, memory_start, memories)[:, None]
            if self.causal:
                visible &= distance <= 0
            if self.window:
                visible &= jnp.abs(distance) < self.window
        if self.explicit is not None:
            explicit = _cut(self.explicit, memory_start, memories)
            visible &= jnp.moveaxis(
                _cut(jnp.moveaxis(explicit, -2, -1), query_start, queries), -1, -2
            )
        return visible

    def distance(
        self,
        query_start: jax.Array | int,
        queries: int,
        memory_start: jax.Array | int,
        memories: int,
    ) -> jax.Array:
        """Position of the key less that of the query, int32 [B or 1, queries, memories]."""
        query = _positions(self.query_positions, query_start, queries)
        memory = _positions(self.memory_positions, memory_start, memories)
        return memory[:, None, :] - query[:, :, None]


def segment_mask(query_segments: jax.Array, memory_segments: jax.Array) -> jax.Array:
    """Tokens of one segment see each other; nobody sees padding (segment 0).

    Args:
        query_segments: int32 [B, Q].
        memory_segments: int32 [B, M].

    Returns:
        bool [B, 1, Q, M]; the axis of size 1 stands for the heads.
    """
    same = query_segments[:, :, None] == memory_segments[:, None, :]
    return (same & (memory_segments > 0)[:, None, :])[:, None]


def _cut(array: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """A slice of the last axis; an axis of size 1 is broadcast."""
    if array.shape[-1] in (1, size):
        return array
    return lax.dynamic_slice_in_dim(array, start, size, array.ndim - 1)


def _positions(given: jax.Array | None, start: jax.Array | int, size: int) -> jax.Array:
    if given is None:
        return (jnp.arange(size, dtype=jnp.int32) + start)[None]
    return _cut(given, start, size)
