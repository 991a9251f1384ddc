"""Label-smoothed cross-entropy (section 5.4), from decoder output to a sum, in one function.

The reference token has probability 1 - eps, every other token eps / (V - 1), as in the authors'
code. In closed form, with logits z and reference y:

    loss = logsumexp(z) - (1 - eps - eps / (V - 1)) * z[y] - eps / (V - 1) * sum(z)

so no one-hot array of the vocabulary exists. The projection to the vocabulary is part of the
function: the gradient is taken chunk by chunk in the forward pass, and [tokens, V] is never held.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.types import Metrics

CHUNK_LOGITS = 2**25  # logits held at a time, over all devices


def smoothed_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    label_smoothing: float,
    bias: jax.Array | None = None,
) -> Metrics:
    """Sums over the real target tokens of a batch.

    Args:
        hidden: decoder output [B, T, D].
        table: output embedding [V, D].
        targets: int [B, T].
        weights: float [B, T], 0 for padding.
        label_smoothing: eps.
        bias: of the logits, [V].

    Returns:
        Metrics; `loss` is differentiable in hidden, table and bias, the others are not.
    """
    weights = weights.astype(jnp.float32)
    sums = _summed(hidden, (table, bias), targets, weights, label_smoothing)
    loss, nll, correct = cast(tuple[jax.Array, ...], sums)
    nll, correct = lax.stop_gradient((nll, correct))
    return Metrics(loss, nll, correct, weights.sum(dtype=jnp.float32), jnp.zeros(()), jnp.ones(()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(hidden, projection, targets, weights, eps):
    total, _ = _scan(hidden, projection, targets, weights, eps, with_gradient=False)
    return total


def _forward(hidden, projection, targets, weights, eps):
    return _scan(hidden, projection, targets, weights, eps, with_gradient=True)


def _backward(eps, gradients, cotangent):
    scaled = jax.tree.map(lambda d: d * cotangent[0].astype(d.dtype), gradients)
    return (*scaled, None, None)


_summed.defvjp(_forward, _backward)


def _scan(hidden, projection, targets, weights, eps, with_gradient):
    """Run over chunks of target positions; all rows stay together, so a sharded batch does too."""
    B, T, D = hidden.shape
    V = projection[0].shape[0]
    chunks = min(T, -(-B * T * V // CHUNK_LOGITS))
    width = -(-T // chunks)
    chunks = -(-T // width)
    pad = chunks * width - T

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, chunks, width, *x.shape[2:]), 1, 0)

    def body(carry, chunk):
        h, y, w = chunk
        sums, d_hidden, d_projection = _chunk(
            h.reshape(-1, D), projection, y.ravel(), w.ravel(), eps, with_gradient
        )
        carry = jax.tree.map(jnp.add, carry, (sums, d_projection))
        return carry, d_hidden.reshape(B, width, -1)

    zeros = (jnp.zeros((), jnp.float32),) * 3
    start = (zeros, jax.tree.map(jnp.zeros_like, projection) if with_gradient else ())
    parts = (split(hidden), split(targets), split(weights))
    if chunks == 1:
        (total, d_projection), d_hidden = body(start, jax.tree.map(lambda x: x[0], parts))
        return total, (d_hidden, d_projection)
    (total, d_projection), d_hidden = lax.scan(body, start, parts)
    d_hidden = jnp.moveaxis(d_hidden, 0, 1).reshape(B, chunks * width, -1)[:, :T]
    return total, (d_hidden, d_projection)


def _chunk(h, projection, y, w, eps, with_gradient):
    """Sums and gradients of some tokens: h [N, D], y [N], w [N]."""
    table, bias = projection
    V = table.shape[0]
    low = eps / (V - 1)
    kernel = table.astype(h.dtype)
    z = jnp.einsum("ND,VD->NV", h, kernel, preferred_element_type=jnp.float32)
    if bias is not None:
        z += bias
    top = z.max(-1)
    exp = jnp.exp(z - top[:, None])
    total = exp.sum(-1)
    log_z = top + jnp.log(total)
    z_y = jnp.take_along_axis(z, y[:, None], 1)[:, 0]
    loss = log_z - (1.0 - eps - low) * z_y
    if eps:
        loss -= low * z.sum(-1)
    sums = ((loss * w).sum(), ((log_z - z_y) * w).sum(), ((z_y >= top) * w).sum())
    if not with_gradient:
        return sums, jnp.zeros((h.shape[0], 0), h.dtype), ()
    hit = lax.broadcasted_iota(y.dtype, z.shape, 1) == y[:, None]
    d_z = (exp / total[:, None] - jnp.where(hit, 1.0 - eps, low)) * w[:, None]
    d_bias = None if bias is None else d_z.sum(0)
    d_z = d_z.astype(h.dtype)
    d_hidden = d_z @ kernel
    d_table = jnp.einsum("NV,ND->VD", d_z, h, preferred_element_type=jnp.float32)
    return sums, d_hidden, (d_table, d_bias)
