"""The boxes of Figure 1: multi-head attention, feed-forward, residual and norm, the two layers.

Each parameter is declared on one line: name, initializer, shape, names of its axes. The names tell
sharding.py how the parameter is spread; nothing else here knows of devices.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import attention, attention_weights, whole
from transformer_jax.model.dropout import DropoutKey, dropout
from transformer_jax.model.linear import linear_attention
from transformer_jax.model.masks import Mask
from transformer_jax.model.positions import RelativeBias, rotate

Initializer = Callable[..., jax.Array]

# Dropout sites inside a layer.
SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD, WEIGHTS, HIDDEN = range(5)


def glorot(inputs: int | tuple[int, ...], outputs: int | tuple[int, ...], scale: float = 1.0):
    """Glorot uniform over the given axes, counted as one matrix."""
    return jax.nn.initializers.variance_scaling(scale, "fan_avg", "uniform", inputs, outputs)


def declare(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: tuple[str, ...]
) -> jax.Array:
    """One float32 parameter with its logical axis names."""
    boxed = nn.with_logical_partitioning(init, axes)
    return cast(jax.Array, module.param(name, boxed, shape, jnp.float32))


def dense(x: jax.Array, kernel: jax.Array, contract: int = 1) -> jax.Array:
    """x times kernel over the last `contract` axes of x, as one two-dimensional matmul.

    With [B, T, D] operands XLA on CPU makes a transposed copy for every weight gradient; on
    [B*T, D] it does not, and the step is an eighth faster.
    """
    rows, inner = x.shape[: x.ndim - contract], math.prod(x.shape[x.ndim - contract :])
    flat = x.reshape(-1, inner) @ kernel.astype(x.dtype).reshape(inner, -1)
    return flat.reshape(*rows, *kernel.shape[contract:])


def layer_scale(config: ModelConfig, depth: int) -> float:
    """Variance of layer `depth` (1, 2, ...) relative to Glorot's (Zhang et al. 2019)."""
    return 1.0 / depth if config.init == "depth_scaled" else 1.0


class KeysAndValues(NamedTuple):
    """What is attended to, projected.

    Keys lie with their places last: on a CPU the products of a decoding step take less than half
    the time so. Nothing is copied for it in training, where the compiler folds it away.
    """

    key: jax.Array  # [B, G, K, M]; of a cache [B, G, N, K, M / N], in N blocks
    value: jax.Array  # [B, G, M, U]


def in_blocks(key: jax.Array, slots: int) -> jax.Array:
    """Keys [B, G, K, M] in blocks of some times of all slots: [B, G, N, K, M / N].

    A step reads the whole cache, and a CPU reads it from memory twice as fast if the rows of a
    block are short. An accelerator wants them long: one block.
    """
    size = max(32, math.lcm(16, slots))
    if jax.default_backend() != "cpu" or key.shape[3] % size:
        return key[:, :, None]
    B, G, K, _ = key.shape
    return jnp.swapaxes(key.reshape(B, G, K, -1, size), 2, 3)


def place_in_blocks(blocks: jax.Array, new: jax.Array, first: jax.Array) -> jax.Array:
    """Write keys [B, G, K, P] to the places `first` and on: within one block, or from place 0."""
    size = blocks.shape[-1]
    if new.shape[3] > size:
        new = jnp.pad(new, ((0, 0), (0, 0), (0, 0), (0, -new.shape[3] % size)))
        new = jnp.swapaxes(new.reshape(*new.shape[:3], -1, size), 2, 3)
    else:
        new = new[:, :, None]
    return lax.dynamic_update_slice(blocks, new, (0, 0, first // size, 0, first % size))


def out_of_blocks(key: jax.Array) -> jax.Array:
    """What in_blocks() was given."""
    return jnp.swapaxes(whole(key), 2, 3)


class Norm(nn.Module):
    """Layer normalisation or RMS normalisation; statistics in float32."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c, wide = self.config, x.astype(jnp.float32)
        scale = declare(self, "scale", nn.initializers.ones, x.shape[-1:], ("embed",))
        if c.norm == "rmsnorm":
            power = jnp.mean(jnp.square(wide), -1, keepdims=True)
            return (wide * lax.rsqrt(power + c.norm_epsilon) * scale).astype(x.dtype)
        bias = declare(self, "bias", nn.initializers.zeros, x.shape[-1:], ("embed",))
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
        return (centred * lax.rsqrt(variance + c.norm_epsilon) * scale + bias).astype(x.dtype)


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O (section 3.2.2).

    With fewer key and value heads G than heads H, each of them serves H / G heads.
    """

    config: ModelConfig
    depth: int = 1
    is_self: bool = True  # self-attention: positions, window and kind apply to it alone

    def setup(self) -> None:
        c = self.config
        D, H, G = c.d_model, c.num_heads, c.num_kv_heads or c.num_heads
        K, U = c.d_k or D // H, c.d_v or D // H
        # The authors drew query, key and value as one matrix of three times the width, which
        # halves the variance that each would have alone.
        scale = layer_scale(c, self.depth)
        into, out = glorot(0, (1, 2), 0.5 * scale), glorot((0, 1), 2, scale)
        self.query = declare(self, "query", into, (D, H, K), ("embed", "heads", "d_k"))
        self.key = declare(self, "key", into, (D, G, K), ("embed", "kv_heads", "d_k"))
        self.value = declare(self, "value", into, (D, G, U), ("embed", "kv_heads", "d_v"))
        self.out = declare(self, "out", out, (H, U, D), ("heads", "d_v", "embed"))
        if c.attention_bias:
            zeros = nn.initializers.zeros
            self.query_bias = declare(self, "query_bias", zeros, (H, K), ("heads", "d_k"))
            self.key_bias = declare(self, "key_bias", zeros, (G, K), ("kv_heads", "d_k"))
            self.value_bias = declare(self, "value_bias", zeros, (G, U), ("kv_heads", "d_v"))
            self.out_bias = declare(self, "out_bias", zeros, (D,), ("embed",))

    def _heads(self, x: jax.Array, name: str) -> jax.Array:
        """[B, T, D] -> [B, H, T, K]."""
        heads = dense(x, getattr(self, name))
        if self.config.attention_bias:
            heads += getattr(self, f"{name}_bias").astype(x.dtype)
        return jnp.swapaxes(heads, 1, 2)

    def _rotated(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        """Queries or keys [B, H, T, K] turned by their positions, if these are rotary."""
        if not self.is_self or self.config.positions != "rotary":
            return x
        if positions is None:
            positions = jnp.arange(x.shape[2], dtype=jnp.int32)[None]
        return rotate(x, positions, self.config.rotary_base)

    def project_memory(
        self, memory: jax.Array, positions: jax.Array | None = None
    ) -> KeysAndValues:
        """Keys and values of what is attended to, [B, M, D]."""
        key = self._rotated(self._heads(memory, "key"), positions)
        return KeysAndValues(jnp.swapaxes(key, 2, 3), self._heads(memory, "value"))

    def attend(
        self,
        x: jax.Array,
        memory: KeysAndValues,
        mask: Mask,
        bias: RelativeBias | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """x [B, Q, D] attends to projected keys and values: [B, Q, D]."""
        c = self.config
        query = self._rotated(self._heads(x, "query"), mask.query_positions)
        key, value = memory
        if key.ndim == 4:
            key = jnp.swapaxes(key, 2, 3)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "weights", attention_weights(query, key, mask, bias))
        if self.is_self and c.attention == "linear":
            context = linear_attention(query, whole(key), value, mask)
        else:
            context = attention(
                query,
                key,
                value,
                mask,
                bias,
                implementation=c.attention_implementation,
                dropout_rate=c.attention_dropout,
                dropout_key=None if drop is None else drop.fold(WEIGHTS),
            )
        result = dense(jnp.swapaxes(context, 1, 2), self.out, contract=2)
        return result + self.out_bias.astype(x.dtype) if c.attention_bias else result

    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array,
        mask: Mask,
        bias: RelativeBias | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """x [B, Q, D] attends to memory [B, M, D] where the mask allows: [B, Q, D]."""
        projected = self.project_memory(memory, mask.memory_positions)
        return self.attend(x, projected, mask, bias, drop)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2 (section 3.3), or a gated one (Shazeer 2020)."""

    config: ModelConfig
    depth: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, drop: DropoutKey | None = None) -> jax.Array:
        c, zeros = self.config, nn.initializers.zeros
        D, F = c.d_model, c.d_ff
        init = glorot(0, 1, layer_scale(c, self.depth))
        inner = declare(self, "inner", init, (D, F), ("embed", "mlp"))
        outer = declare(self, "outer", init, (F, D), ("mlp", "embed"))
        hidden = dense(x, inner)
        if c.ff_bias:
            hidden += declare(self, "inner_bias", zeros, (F,), ("mlp",)).astype(x.dtype)
        if c.activation in ("swiglu", "geglu"):
            gate = dense(x, declare(self, "gate", init, (D, F), ("embed", "mlp")))
            hidden *= jax.nn.silu(gate) if c.activation == "swiglu" else jax.nn.gelu(gate)
        else:
            hidden = getattr(jax.nn, c.activation)(hidden)
        hidden = dropout(hidden, c.activation_dropout, None if drop is None else drop.fold(HIDDEN))
        result = dense(hidden, outer)
        if c.ff_bias:
            result += declare(self, "outer_bias", zeros, (D,), ("embed",)).astype(x.dtype)
        return result


def residual(
    config: ModelConfig,
    x: jax.Array,
    sublayer: Callable[[jax.Array], jax.Array],
    norm: Norm,
    drop: DropoutKey | None,
) -> jax.Array:
    """Residual connection, dropout and norm around a sublayer (sections 3.1 and 5.4)."""
    if config.norm_position == "pre":
        return x + dropout(sublayer(norm(x)), config.dropout, drop)
    return norm(x + dropout(sublayer(x), config.dropout, drop))


def _site(drop: DropoutKey | None, site: int) -> DropoutKey | None:
    return None if drop is None else drop.fold(site)


class EncoderLayer(nn.Module):
    """Left half of Figure 1: self-attention, feed-forward."""

    config: ModelConfig
    depth: int = 1

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, self.depth)
        self.self_attention_norm = Norm(self.config)
        self.feed_forward = FeedForward(self.config, self.depth)
        self.feed_forward_norm = Norm(self.config)

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        bias: RelativeBias | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """x [B, S, D] -> [B, S, D]."""
        c, site = self.config, _site(drop, SELF_ATTENTION)
        attend = lambda y: self.self_attention(y, y, mask, bias, site)
        x = residual(c, x, attend, self.self_attention_norm, site)
        site = _site(drop, FEED_FORWARD)
        feed = lambda y: self.feed_forward(y, site)
        return residual(c, x, feed, self.feed_forward_norm, site)


class DecoderLayer(nn.Module):
    """Right half of Figure 1: masked self-attention, cross-attention, feed-forward.

    Without an encoder (decoder-only models) the cross-attention is left out.
    """

    config: ModelConfig
    depth: int = 1

    def setup(self) -> None:
        self.self_attention = MultiHeadAttention(self.config, self.depth)
        self.self_attention_norm = Norm(self.config)
        if self.config.encoder_layers:
            self.cross_attention = MultiHeadAttention(self.config, self.depth, is_self=False)
            self.cross_attention_norm = Norm(self.config)
        self.feed_forward = FeedForward(self.config, self.depth)
        self.feed_forward_norm = Norm(self.config)

    def project_memory(self, memory: jax.Array) -> KeysAndValues:
        """Cross-attention of memory [B, S, D]: computed once for each sentence."""
        return self.cross_attention.project_memory(memory)

    def __call__(
        self,
        x: jax.Array,
        self_mask: Mask,
        bias: RelativeBias | None,
        memory: jax.Array | None,
        cross_mask: Mask | None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """x [B, T, D], memory [B, S, D] -> [B, T, D]."""
        site = _site(drop, SELF_ATTENTION)
        cross = None if memory is None else self.project_memory(memory)
        attend_self = lambda y: self.self_attention(y, y, self_mask, bias, site)
        return self._sublayers(x, attend_self, cross, cross_mask, drop)

    def step(
        self,
        x: jax.Array,
        cache: KeysAndValues,
        index: jax.Array,
        self_mask: Mask,
        bias: RelativeBias | None,
        cross: KeysAndValues | None,
        cross_mask: Mask | None,
        slots: int,
    ) -> tuple[jax.Array, KeysAndValues]:
        """New tokens beside a cache of keys and values.

        Args:
            x: [B, P, W', D]: P new tokens for each of the first W' beam slots.
            cache: self-attention over T * slots places: slot w at time t has place t * slots + w;
                the new ones take the times index to index + P.
            index: int32 [].
            self_mask: from P * W' queries to T * slots keys.
            bias: of the self-attention.
            cross: of the source.
            cross_mask: from P * W' queries to S keys.
            slots: beam slots that the cache has places for.

        Returns:
            x [B, P, W', D] and the new cache.
        """
        B, P, W, D = x.shape

        def all_slots(new: jax.Array, axis: int) -> jax.Array:
            """P * W' columns along an axis as P * slots, empty slots filled with zeros."""
            if slots == W:
                return new
            shape = (*new.shape[:axis], P, W, *new.shape[axis + 1 :])
            pad = [(0, slots - W if i == axis + 1 else 0) for i in range(len(shape))]
            new = jnp.pad(new.reshape(shape), pad)
            return new.reshape(*new.shape[:axis], P * slots, *new.shape[axis + 2 :])

        def attend_self(y: jax.Array) -> jax.Array:
            nonlocal cache
            new = self.self_attention.project_memory(y, self_mask.query_positions)
            key = all_slots(new.key, 3).astype(cache.key.dtype)
            value = all_slots(new.value, 2).astype(cache.value.dtype)
            cache = KeysAndValues(
                place_in_blocks(cache.key, key, index * slots),
                lax.dynamic_update_slice_in_dim(cache.value, value, index * slots, 2),
            )
            return self.self_attention.attend(y, cache, self_mask, bias)

        x = self._sublayers(x.reshape(B, P * W, D), attend_self, cross, cross_mask, None)
        return x.reshape(B, P, W, D), cache

    def _sublayers(
        self,
        x: jax.Array,
        attend_self: Callable[[jax.Array], jax.Array],
        cross: KeysAndValues | None,
        cross_mask: Mask | None,
        drop: DropoutKey | None,
    ) -> jax.Array:
        """The three sublayers in the order of Figure 1."""
        c = self.config
        x = residual(c, x, attend_self, self.self_attention_norm, _site(drop, SELF_ATTENTION))
        if cross is not None and cross_mask is not None:
            site = _site(drop, CROSS_ATTENTION)
            attend = lambda y: self.cross_attention.attend(y, cross, cross_mask, None, site)
            x = residual(c, x, attend, self.cross_attention_norm, site)
        site = _site(drop, FEED_FORWARD)
        feed = lambda y: self.feed_forward(y, site)
        return residual(c, x, feed, self.feed_forward_norm, site)
