"""Kernelised linear attention (Katharopoulos et al. 2020): softmax replaced by a product.

    out_i = phi(q_i) sum_j phi(k_j) v_j^T / phi(q_i) sum_j phi(k_j)      phi(x) = elu(x) + 1

The sums over j are carried along the sequence, so time and memory grow with its length, not with
its square. This is another function than softmax attention, chosen by --model.attention linear.
"""

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.model.masks import Mask

CHUNK = 128


def linear_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask, chunk: int = CHUNK
) -> jax.Array:
    """Self-attention in linear time: query [B, H, T, K], key [B, G, T, K], value [B, G, T, U].

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        mask: segments stand side by side in a row; `explicit` booleans (decoding with a cache) are
            answered by the direct formula.
        chunk: positions that are taken together.

    Returns:
        [B, H, T, U]; zeros for a query that sees nothing.
    """
    repeat = query.shape[1] // key.shape[1]
    query, key = _phi(query), _phi(jnp.repeat(key, repeat, 1))
    wide = jnp.repeat(value, repeat, 1).astype(jnp.float32)
    if mask.explicit is not None:
        weights = jnp.einsum("BHQK,BHMK->BHQM", query, key)
        weights = jnp.where(mask.dense(query.shape[2], key.shape[2]), weights, 0.0)
        sums = weights @ wide, weights.sum(-1)
    else:
        segments = mask.query_segments
        if segments is None:
            segments = jnp.ones((query.shape[0], query.shape[2]))
        segments = jnp.asarray(segments, jnp.int32)
        sums = _running_sums(query, key, wide, segments, chunk, own=True)
        if not mask.causal:
            back = [x[:, :, ::-1] for x in (query, key, wide)]
            turned = _running_sums(back[0], back[1], back[2], segments[:, ::-1], chunk, own=False)
            sums = tuple(a + b[:, :, ::-1] for a, b in zip(sums, turned, strict=True))
    total, weight = sums
    weight = weight[..., None]
    return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0).astype(value.dtype)


def _phi(x: jax.Array) -> jax.Array:
    return jax.nn.elu(x.astype(jnp.float32)) + 1.0


def _running_sums(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    chunk: int,
    own: bool,
) -> tuple[jax.Array, jax.Array]:
    """Numerator [B, H, T, U] and denominator [B, H, T] over the keys up to each query.

    Args:
        query: phi(q), [B, H, T, K].
        key: phi(k), [B, H, T, K].
        value: [B, H, T, U].
        segments: int32 [B, T].
        chunk: positions taken together.
        own: a query sees the key at its own position too.
    """
    B, H, T, K = query.shape
    n = min(chunk, T)
    count = -(-T // n)
    pad = count * n - T

    def split(x: jax.Array) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[-2 if x.ndim == 4 else -1] = (0, pad)
        x = jnp.pad(x, widths)
        if x.ndim == 2:
            return jnp.moveaxis(x.reshape(B, count, n), 1, 0)
        return jnp.moveaxis(x.reshape(B, H, count, n, -1), 2, 0)

    before = jnp.tril(jnp.ones((n, n), bool), 0 if own else -1)

    def step(state, part):
        total, weight, running = state  # [B, H, K, U], [B, H, K], [B]
        q, k, v, s = part
        same = (s[:, :, None] == s[:, None, :]) & (s > 0)[:, None, :] & before
        scores = jnp.where(same[:, None], jnp.einsum("BHQK,BHMK->BHQM", q, k), 0.0)
        goes_on = ((s == running[:, None]) & (s > 0))[:, None, :, None]
        earlier = jnp.where(goes_on, q, 0.0)
        numerator = scores @ v + earlier @ total
        denominator = scores.sum(-1) + jnp.einsum("BHQK,BHK->BHQ", earlier, weight)
        last = s[:, -1]
        keep = (last == running)[:, None, None]
        new = jnp.where((s == last[:, None])[:, None, :, None], k, 0.0)
        total = jnp.where(keep[..., None], total, 0.0) + jnp.einsum("BHMK,BHMU->BHKU", new, v)
        weight = jnp.where(keep, weight, 0.0) + new.sum(2)
        return (total, weight, last), (numerator, denominator)

    start = (
        jnp.zeros((B, H, K, value.shape[-1]), jnp.float32),
        jnp.zeros((B, H, K), jnp.float32),
        jnp.zeros((B,), jnp.int32),
    )
    _, (numerator, denominator) = lax.scan(
        step, start, tuple(map(split, (query, key, value, segments)))
    )
    numerator = jnp.moveaxis(numerator, 0, 2).reshape(B, H, count * n, -1)
    denominator = jnp.moveaxis(denominator, 0, 2).reshape(B, H, count * n)
    return numerator[:, :, :T], denominator[:, :, :T]
