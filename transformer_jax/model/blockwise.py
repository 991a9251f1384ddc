"""Exact attention that never holds the scores [Q, M]: blocks, and an online softmax.

For one block of queries the keys are read block by block. With m the largest score so far, l the
sum of exp(score - m) and a the weighted sum of values, a new block of scores s changes them to

    m' = max(m, max s)    l' = l exp(m - m') + sum exp(s - m')    a' = a exp(m - m') + exp(s - m') V

and a / l is the attention in the end. Each block is computed again in the backward pass
(jax.checkpoint), so memory grows with Q + M there too. Blocks that nobody may see are skipped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.model.dropout import DropoutKey, dropout_block
from transformer_jax.model.masks import Mask
from transformer_jax.model.positions import RelativeBias

_LOWEST = -1e30
BLOCK = 512


def blockwise_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: RelativeBias | None = None,
    *,
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """As attention(): query [B, H, Q, K], key [B, G, M, K], value [B, G, M, U] -> [B, H, Q, U].

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        mask: who may attend to whom.
        bias: added to the scores.
        dropout_rate: dropout on the weights; the bits are those of the plain implementation.
        dropout_key: None: no dropout.
        block: queries and keys of a block.
    """
    B, H, Q, K = query.shape
    G, M, U = key.shape[1], key.shape[2], value.shape[3]
    q, m = min(block, Q), min(block, M)
    query, mask = _pad_queries(query * K**-0.5, mask, -Q % q)
    key, value, mask = _pad_memory(key, value, mask, -M % m)
    rows, columns = query.shape[2] // q, key.shape[2] // m

    def one_row(i: jax.Array, q_block: jax.Array) -> jax.Array:
        """Attention of one block of queries, [B, H, q, U]."""
        grouped = q_block.reshape(B, G, H // G * q, K)

        def one_block(state, j):
            k_block = lax.dynamic_slice_in_dim(key, j * m, m, 2)
            v_block = lax.dynamic_slice_in_dim(value, j * m, m, 2)
            scores = jnp.einsum(
                "BGQK,BGMK->BGQM", grouped, k_block, preferred_element_type=jnp.float32
            ).reshape(B, H, q, m)
            if bias is not None:
                scores += bias(mask.distance(i * q, q, j * m, m))
            visible = mask.block(i * q, q, j * m, m)
            highest, total, acc = state
            scores = jnp.where(visible, scores, _LOWEST)
            new = jnp.maximum(highest, lax.stop_gradient(scores.max(-1)))
            shrink = jnp.exp(highest - new)
            weights = jnp.where(visible, jnp.exp(scores - new[..., None]), 0.0)
            total = total * shrink + weights.sum(-1)
            weights = dropout_block(
                weights, dropout_rate, dropout_key, (0, i * q, j * m), (H, Q, M)
            )
            part = jnp.einsum(
                "BGQM,BGMU->BGQU",
                weights.astype(value.dtype).reshape(B, G, H // G * q, m),
                v_block,
                preferred_element_type=jnp.float32,
            ).reshape(B, H, q, U)
            return new, total, acc * shrink[..., None] + part

        @jax.checkpoint  # around the cond: what its branches keep would be stacked over all blocks
        def step(state, j):
            needed = mask.block(i * q, q, j * m, m).any()
            return lax.cond(needed, lambda: one_block(state, j), lambda: state), None

        start = (
            jnp.full((B, H, q), _LOWEST, jnp.float32),
            jnp.zeros((B, H, q), jnp.float32),
            jnp.zeros((B, H, q, U), jnp.float32),
        )
        (_, total, acc), _ = lax.scan(step, start, jnp.arange(columns))
        total = total[..., None]
        result = jnp.where(total > 0, acc / jnp.where(total > 0, total, 1.0), 0.0)
        return result.astype(value.dtype)

    if rows == 1:
        return one_row(jnp.zeros((), jnp.int32), query)[:, :, :Q]
    blocks = jnp.moveaxis(query.reshape(B, H, rows, q, K), 2, 0)
    result = lax.map(functools.partial(_apply, jax.checkpoint(one_row)), (jnp.arange(rows), blocks))
    return jnp.moveaxis(result, 0, 2).reshape(B, H, rows * q, U)[:, :, :Q]


def _apply(function, arguments):
    return function(*arguments)


def _pad_queries(query: jax.Array, mask: Mask, pad: int) -> tuple[jax.Array, Mask]:
    if not pad:
        return query, mask
    query = jnp.pad(query, ((0, 0), (0, 0), (0, pad), (0, 0)))
    return query, dataclasses.replace(
        mask,
        query_segments=_pad_row(mask.query_segments, pad),
        query_positions=_pad_row(mask.query_positions, pad),
        explicit=_pad_explicit(mask.explicit, (pad, 0)),
    )


def _pad_memory(
    key: jax.Array, value: jax.Array, mask: Mask, pad: int
) -> tuple[jax.Array, jax.Array, Mask]:
    """Keys added here must never be seen: where there are no segments, make some."""
    if not pad:
        return key, value, mask
    segments = mask.memory_segments
    if segments is None:
        segments = jnp.ones((key.shape[0], key.shape[2]), jnp.int32)
        queries = mask.query_segments
        mask = dataclasses.replace(
            mask, query_segments=jnp.ones((1, 1), jnp.int32) if queries is None else queries
        )
    key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (key, value))
    return (
        key,
        value,
        dataclasses.replace(
            mask,
            memory_segments=_pad_row(segments, pad),
            memory_positions=_pad_row(mask.memory_positions, pad),
            explicit=_pad_explicit(mask.explicit, (0, pad)),
        ),
    )


def _pad_row(row: jax.Array | None, pad: int) -> jax.Array | None:
    return None if row is None else jnp.pad(row, ((0, 0), (0, pad)))


def _pad_explicit(explicit: jax.Array | None, pads: tuple[int, int]) -> jax.Array | None:
    """Only axes that are not broadcast are padded."""
    if explicit is None:
        return None
    widths = [(0, 0)] * (explicit.ndim - 2)
    for axis, pad in zip((-2, -1), pads, strict=True):
        widths.append((0, pad if explicit.shape[axis] > 1 else 0))
    return jnp.pad(explicit, widths)
