"""Scaled dot-product attention (section 3.2.1 of the paper): one meaning, several implementations.

plain       holds the scores [B, H, Q, M]; the fastest for short sequences on a CPU
blockwise   exact, holds one block of scores at a time, in the backward pass too (blockwise.py)
cudnn       the fused kernel of NVIDIA GPUs, float16 and bfloat16
tpu         the fused kernel of TPUs from jax.experimental.pallas
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.config import ConfigError
from transformer_jax.model.blockwise import blockwise_attention
from transformer_jax.model.dropout import DropoutKey, dropout
from transformer_jax.model.masks import Mask
from transformer_jax.model.positions import RelativeBias

# Far below every real score, yet finite, so that no gradient ever meets inf - inf.
MASKED = -1e30
# From this length on `auto` avoids holding the scores.
LONG = 2048


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: RelativeBias | None = None,
    *,
    implementation: str = "auto",
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)) V, equation (1).

    Args:
        query: [B, H, Q, K].
        key: [B, G, M, K]; G divides H, and each key head serves H / G query heads. Or as a
            cache holds them, in N blocks: [B, G, N, K, M / N].
        value: [B, G, M, U], where U is d_v.
        mask: who may attend to whom.
        bias: added to the scores.
        implementation: by name, or auto.
        dropout_rate: dropout on the attention weights.
        dropout_key: None: no dropout.

    Returns:
        [B, H, Q, U] in the type of `value`. A query that may attend to nothing gets zeros.

    Raises:
        ConfigError: the implementation named cannot do what is asked for on this device.
    """
    drops = dropout_key is not None and dropout_rate > 0
    if implementation == "auto":
        implementation = _choose(query, value, mask, bias, drops)
    if implementation == "plain":
        weights = attention_weights(query, key, mask, bias)
        weights = dropout(weights, dropout_rate, dropout_key)
        return _weighted_sum(weights, value)
    key = whole(key)
    if implementation == "blockwise":
        return blockwise_attention(
            query, key, value, mask, bias, dropout_rate=dropout_rate, dropout_key=dropout_key
        )
    refusal = _refusal(implementation, query, mask, bias, drops)
    if refusal:
        raise ConfigError(f"--model.attention-implementation: got {implementation!r}: {refusal}")
    fused = _cudnn if implementation == "cudnn" else _tpu
    repeat = query.shape[1] // key.shape[1]  # the fused kernels want a key head for each head
    result = fused(query, jnp.repeat(key, repeat, 1), jnp.repeat(value, repeat, 1), mask)
    sees = mask.dense(query.shape[2], key.shape[2]).any(-1, keepdims=True)
    return jnp.where(sees, result, 0)


def whole(key: jax.Array) -> jax.Array:
    """Keys [B, G, M, K], whether or not they are in blocks."""
    if key.ndim == 4:
        return key
    B, G, _, K, _ = key.shape
    return jnp.swapaxes(key, 3, 4).reshape(B, G, -1, K)


def attention_weights(
    query: jax.Array, key: jax.Array, mask: Mask, bias: RelativeBias | None = None
) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)), float32 [B, H, Q, M]; zeros where nothing may be attended to.

    Keys may be in blocks, as in attention().
    """
    B, H, Q, K = query.shape
    G = key.shape[1]
    scores = _products((query * K**-0.5).reshape(B, G, H // G * Q, K), key)
    M = scores.shape[3]
    scores = scores.reshape(B, H, Q, M)
    if bias is not None:
        scores += bias(mask.distance(0, Q, 0, M))
    visible = mask.dense(Q, M)
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    return jnp.where(visible, weights, 0.0)


def _products(query: jax.Array, key: jax.Array) -> jax.Array:
    """Of queries [B, G, Q, K] with all keys of their head: float32 [B, G, Q, M]."""
    if key.ndim == 4:
        return jnp.einsum("BGQK,BGMK->BGQM", query, key, preferred_element_type=jnp.float32)
    # The queries once for each block: one product of many small matrices.
    B, G, N, K, M = key.shape
    query = jnp.broadcast_to(query[:, :, None], (B, G, N, query.shape[2], K))
    found = jnp.einsum("BGNQK,BGNKM->BGNQM", query, key, preferred_element_type=jnp.float32)
    return jnp.swapaxes(found, 2, 3).reshape(B, G, -1, N * M)


def _weighted_sum(weights: jax.Array, value: jax.Array) -> jax.Array:
    B, H, Q, M = weights.shape
    G = value.shape[1]
    grouped = weights.astype(value.dtype).reshape(B, G, H // G * Q, M)
    return jnp.einsum("BGQM,BGMU->BGQU", grouped, value).reshape(B, H, Q, -1)


def _choose(
    query: jax.Array, value: jax.Array, mask: Mask, bias: RelativeBias | None, drops: bool
) -> str:
    long = max(query.shape[2], value.shape[2]) >= LONG
    fused = {"gpu": "cudnn", "tpu": "tpu"}.get(jax.default_backend())
    if fused and not _refusal(fused, query, mask, bias, drops) and (long or fused == "cudnn"):
        return fused
    return "blockwise" if long and mask.explicit is None else "plain"


def _refusal(
    implementation: str, query: jax.Array, mask: Mask, bias: RelativeBias | None, drops: bool
) -> str:
    """Why a fused kernel cannot do it; empty: it can."""
    device = {"cudnn": "gpu", "tpu": "tpu"}[implementation]
    if jax.default_backend() != device:
        return f"it needs a {device.upper()}, this is a {jax.default_backend()}"
    if bias is not None or mask.explicit is not None or mask.window or drops:
        return "it has no relative bias, window, beam mask or dropout of weights"
    if implementation == "cudnn" and query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"it needs --model.dtype bfloat16, got {query.dtype}"
    if implementation == "tpu" and (query.shape[2] % 128 or query.shape[2] < 128):
        return f"it needs lengths that are multiples of 128, got {query.shape[2]}"
    return ""


def _cudnn(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask) -> jax.Array:
    """Lengths tell the padding of unpacked rows; packed rows need the booleans."""
    swap = lambda x: jnp.swapaxes(x, 1, 2)
    packed = mask.query_positions is not None or mask.query_segments is None
    arguments: dict[str, Any] = {"mask": mask.dense(query.shape[2], key.shape[2])}
    if not packed and mask.query_segments is not None and mask.memory_segments is not None:
        arguments = {
            "is_causal": mask.causal,
            "query_seq_lengths": (mask.query_segments > 0).sum(1, dtype=jnp.int32),
            "key_value_seq_lengths": (mask.memory_segments > 0).sum(1, dtype=jnp.int32),
        }
    result = jax.nn.dot_product_attention(
        swap(query), swap(key), swap(value), implementation="cudnn", **arguments
    )
    return swap(result)


def _tpu(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    segments = None
    if mask.query_segments is not None and mask.memory_segments is not None:
        segments = pallas.SegmentIds(mask.query_segments, mask.memory_segments)
    return pallas.flash_attention(
        query,
        key,
        value,
        segment_ids=segments,
        causal=mask.causal,
        sm_scale=query.shape[-1] ** -0.5,
    )
