"""Who may attend to whom. Masks are booleans, True = may attend, combined by `&`, applied once."""

import jax
import jax.numpy as jnp


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


def causal_mask(length: int) -> jax.Array:
    """Position i sees positions up to and including i (section 3.2.3): lower triangle.

    Returns:
        bool [1, 1, T, T].
    """
    return jnp.tril(jnp.ones((length, length), bool))[None, None]
