"""Scaled dot-product attention (section 3.2.1 of the paper)."""

import jax
import jax.numpy as jnp

from transformer_jax.model.dropout import DropoutKey, dropout

# Far below every real score, yet finite, so that no gradient ever meets inf - inf.
MASKED = -1e30


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    dropout_rate: float = 0.0,
    dropout_key: DropoutKey | None = None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(d_k)) V, equation (1).

    Args:
        query: [B, H, Q, K].
        key: [B, H, M, K].
        value: [B, H, M, K'], where K' is d_v.
        mask: bool, broadcasts to [B, H, Q, M], True = may attend.
        dropout_rate: dropout on the attention weights.
        dropout_key: None: no dropout.

    Returns:
        [B, H, Q, K'] in the type of `value`. A query that may attend to nothing gets zeros.
    """
    scale = query.shape[-1] ** -0.5
    scores = jnp.einsum("BHQK,BHMK->BHQM", query * scale, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
    weights = jnp.where(mask, weights, 0.0)
    weights = dropout(weights, dropout_rate, dropout_key)
    return jnp.einsum("BHQM,BHMK->BHQK", weights.astype(value.dtype), value)
