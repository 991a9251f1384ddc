"""The encoder and decoder stacks (section 3.1), embeddings (3.4), pure functions on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.model.dropout import DropoutKey, dropout
from transformer_jax.model.layers import (
    DecoderLayer,
    EncoderLayer,
    KeysAndValues,
    Norm,
    declare,
    in_blocks,
    out_of_blocks,
)
from transformer_jax.model.masks import Mask
from transformer_jax.model.positions import RelativeBias, sinusoids_at
from transformer_jax.sharding import spread_rows
from transformer_jax.types import Batch

Params = Any  # nested dict of arrays

# Dropout sites of the two stacks; layer i of a stack is site + 1 + i.
ENCODER, DECODER = 0, 1000


class DecodeCache(NamedTuple):
    """What decoding remembers: a value that goes in and comes out.

    Keys and values of the hypotheses are never reordered. A hypothesis in slot w at time t finds
    its own past through `ancestry`, which says in which slot it stood at each earlier time.
    """

    past: tuple[KeysAndValues, ...]  # L x over T * W places, place t * W + w: slot w at time t
    cross: tuple[KeysAndValues, ...]  # L x over S places, one for all beams of a sentence
    src_mask: jax.Array | None  # bool [B, S]
    ancestry: jax.Array  # int32 [B, W, T]
    positions: jax.Array  # int32 [B, T]: position of the token at each time; EMPTY: none there
    lengths: jax.Array  # int32 [B]: tokens of each sentence so far, its next position
    index: jax.Array  # int32 []: time at which the next token is written

    def grown(self, more: int) -> "DecodeCache":
        """The same cache with room for so many tokens more."""
        slots = self.ancestry.shape[1]
        widen = lambda x, axis, n: jnp.pad(x, [(0, n if i == axis else 0) for i in range(x.ndim)])
        longer = lambda past: KeysAndValues(
            in_blocks(widen(out_of_blocks(past.key), 3, more * slots), slots),
            widen(past.value, 2, more * slots),
        )
        return self._replace(
            past=tuple(longer(past) for past in self.past),
            ancestry=widen(self.ancestry, 2, more),
            positions=jnp.pad(self.positions, ((0, 0), (0, more)), constant_values=EMPTY),
        )


EMPTY = -1


class Transformer(nn.Module):
    """The whole of Figure 1. Each method is a pure function of (parameters, arguments)."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        V, D, both = c.vocab_size, c.d_model, ("vocab", "embed")
        init = nn.initializers.normal(D**-0.5)
        self.target_table = declare(self, "embedding", init, (V, D), both)
        self.source_table = self.output_table = self.target_table
        if c.encoder_layers and c.tied_embeddings != "all":
            rows = c.source_vocab_size or V
            self.source_table = declare(self, "source_embedding", init, (rows, D), both)
        if c.tied_embeddings == "none":
            self.output_table = declare(self, "output_embedding", init, (V, D), both)
        if c.logits_bias:
            self.output_bias = declare(self, "output_bias", nn.initializers.zeros, (V,), ("vocab",))
        for stack in ("encoder", "decoder") if c.encoder_layers else ("decoder",):
            self._declare_positions(stack)
        self.encoder = [EncoderLayer(c, 1 + i) for i in range(c.encoder_layers)]
        self.decoder = [DecoderLayer(c, 1 + i) for i in range(c.decoder_layers)]
        if c.norm_position == "pre":
            self.decoder_norm = Norm(c)
            if c.encoder_layers:
                self.encoder_norm = Norm(c)

    def _declare_positions(self, stack: str) -> None:
        """Learned positions and relative biases: one table for each stack."""
        c = self.config
        if c.positions == "learned":
            name, shape = f"{stack}_positions", (c.max_positions, c.d_model)
            init = nn.initializers.normal(c.d_model**-0.5)
            setattr(self, name, declare(self, name, init, shape, ("positions", "embed")))
        if c.positions == "relative":
            name, shape = f"{stack}_relative_bias", (c.relative_buckets, c.num_heads)
            init = nn.initializers.normal(c.d_model**-0.5)
            setattr(self, name, declare(self, name, init, shape, ("buckets", "heads")))

    def __call__(
        self,
        src_ids: jax.Array | None,
        tgt_in_ids: jax.Array,
        src_segments: jax.Array | None = None,
        tgt_segments: jax.Array | None = None,
        src_positions: jax.Array | None = None,
        tgt_positions: jax.Array | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """Logits of every next token: src_ids [B, S], tgt_in_ids [B, T] -> float32 [B, T, V].

        Absent segments mean that every id is real. Training uses `hidden`, which stops short of
        the vocabulary; see train/loss.py.
        """
        segments, positions = (src_segments, tgt_segments), (src_positions, tgt_positions)
        return self.logits(self.hidden(src_ids, tgt_in_ids, *segments, *positions, drop))

    def hidden(
        self,
        src_ids: jax.Array | None,
        tgt_in_ids: jax.Array,
        src_segments: jax.Array | None = None,
        tgt_segments: jax.Array | None = None,
        src_positions: jax.Array | None = None,
        tgt_positions: jax.Array | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """Decoder output before the projection to the vocabulary, [B, T, D]."""
        if tgt_segments is None:
            tgt_segments = jnp.ones_like(tgt_in_ids)
        memory = cross_mask = None
        if self.config.encoder_layers:
            if src_ids is None:
                raise ValueError("src_ids: got None, allowed: ids, since the model has an encoder")
            if src_segments is None:
                src_segments = jnp.ones_like(src_ids)
            memory = self.encode_segments(src_ids, src_segments, src_positions, drop)
            cross_mask = Mask(tgt_segments, src_segments)
        self_mask = Mask(
            tgt_segments,
            tgt_segments,
            tgt_positions,
            tgt_positions,
            causal=True,
            window=self.config.attention_window,
        )
        drop = None if drop is None else drop.fold(DECODER)
        x = self._embed("decoder", tgt_in_ids, tgt_positions, tgt_in_ids.shape[1], drop)
        bias = self._relative_bias("decoder")
        layer = lambda layer, x, drop: layer(x, self_mask, bias, memory, cross_mask, drop)
        return self._final_norm(self._stack("decoder", layer, x, drop))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 [..., V]: the embedding table transposed, not scaled."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        table = self.output_table.astype(hidden.dtype)
        product = jnp.einsum("ND,VD->NV", flat, table, preferred_element_type=jnp.float32)
        if self.config.logits_bias:
            product += self.output_bias
        return product.reshape(*hidden.shape[:-1], -1)

    def encode(self, src_ids: jax.Array, src_mask: jax.Array) -> jax.Array:
        """src_ids [B, S], src_mask bool [B, S] -> memory [B, S, D]."""
        return self.encode_segments(src_ids, src_mask.astype(jnp.int32))

    def encode_segments(
        self,
        src_ids: jax.Array,
        src_segments: jax.Array,
        src_positions: jax.Array | None = None,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """src_ids [B, S], src_segments int32 [B, S] (0 = padding) -> memory [B, S, D]."""
        mask = Mask(
            src_segments,
            src_segments,
            src_positions,
            src_positions,
            window=self.config.attention_window,
        )
        drop = None if drop is None else drop.fold(ENCODER)
        x = self._embed("encoder", src_ids, src_positions, src_ids.shape[1], drop)
        bias = self._relative_bias("encoder")
        layer = lambda layer, x, drop: layer(x, mask, bias, drop)
        x = self._stack("encoder", layer, x, drop)
        return self.encoder_norm(x) if self.config.norm_position == "pre" else x

    def init_cache(
        self,
        memory: jax.Array | None,
        src_mask: jax.Array | None,
        max_len: int,
        beam_size: int = 1,
        batch_size: int | None = None,
    ) -> DecodeCache:
        """An empty cache for `max_len` target tokens; cross-attention is projected here, once.

        Args:
            memory: [B, S, D]; None for a decoder-only model, which needs `batch_size`.
            src_mask: bool [B, S].
            max_len: tokens the cache can hold, prompt included.
            beam_size: hypotheses W of each sentence.
            batch_size: B, where there is no memory to read it from.
        """
        c = self.config
        _require_known(c, max_len)
        B = batch_size if memory is None else memory.shape[0]
        assert B is not None, "a decoder-only model needs batch_size"
        K, U = c.d_k or c.d_model // c.num_heads, c.d_v or c.d_model // c.num_heads
        cross = () if memory is None else (layer.project_memory(memory) for layer in self.decoder)
        G, M, dtype = c.num_kv_heads or c.num_heads, max_len * beam_size, jnp.dtype(c.dtype)
        empty = lambda: KeysAndValues(
            in_blocks(jnp.zeros((B, G, K, M), dtype), beam_size), jnp.zeros((B, G, M, U), dtype)
        )
        return DecodeCache(
            past=tuple(empty() for _ in self.decoder),
            cross=tuple(cross),
            src_mask=src_mask,
            ancestry=jnp.zeros((B, beam_size, max_len), jnp.int32),
            positions=jnp.full((B, max_len), EMPTY, jnp.int32),
            lengths=jnp.zeros((B,), jnp.int32),
            index=jnp.zeros((), jnp.int32),
        )

    def prefill(
        self, tgt_ids: jax.Array, cache: DecodeCache, tgt_mask: jax.Array | None = None
    ) -> tuple[jax.Array, DecodeCache]:
        """Take a target prefix or prompt in one pass, into slot 0 of an empty cache.

        Args:
            tgt_ids: [B, P]; shorter prompts are padded on the right.
            cache: as init_cache made it.
            tgt_mask: bool [B, P], True = real; None: all real.

        Returns:
            Logits [B, P, V] of the token after each position, and the cache.
        """
        B, P = tgt_ids.shape
        if tgt_mask is None:
            tgt_mask = jnp.ones((B, P), bool)
        times = jnp.where(tgt_mask, jnp.arange(P, dtype=jnp.int32), EMPTY)
        cache = cache._replace(
            positions=cache.positions.at[:, :P].set(times),
            lengths=jnp.sum(tgt_mask, 1, dtype=jnp.int32),
        )
        queries = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
        x = self._embed("decoder", tgt_ids, None, P)
        slots = jnp.zeros((B, 1, cache.ancestry.shape[2]), jnp.int32)  # slot 0 at every time
        x, cache = self._cached_layers(x[:, :, None], queries, slots, cache)
        return self.logits(x[:, :, 0]), cache._replace(index=jnp.asarray(P, jnp.int32))

    def decode_step(
        self, token: jax.Array, parent: jax.Array | None, cache: DecodeCache
    ) -> tuple[jax.Array, DecodeCache]:
        """One token for every hypothesis.

        Args:
            token: int32 [B, W].
            parent: int32 [B, W], the slot that each token continues; None: its own.
            cache: holds cache.index earlier tokens; must have room for one more.

        Returns:
            Logits [B, W, V] of the next token, and the cache.
        """
        B, W = token.shape
        ancestry = cache.ancestry
        if parent is not None:
            ancestry = jnp.take_along_axis(ancestry, parent[:, :, None], axis=1)
        own = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (B, W, 1))
        ancestry = lax.dynamic_update_slice_in_dim(ancestry, own, cache.index, 2)
        now = cache.lengths[:, None]
        cache = cache._replace(
            ancestry=ancestry,
            positions=lax.dynamic_update_slice_in_dim(cache.positions, now, cache.index, 1),
            lengths=cache.lengths + 1,
        )
        x = self._embed("decoder", token, now, ancestry.shape[2])
        queries = jnp.broadcast_to(now, (B, W))
        x, cache = self._cached_layers(x[:, None], queries, ancestry, cache)
        return self.logits(x[:, 0]), cache._replace(index=cache.index + 1)

    def _cached_layers(
        self, x: jax.Array, queries: jax.Array, ancestry: jax.Array, cache: DecodeCache
    ) -> tuple[jax.Array, DecodeCache]:
        """New tokens through the decoder beside the cache, which their keys and values join.

        Args:
            x: [B, P, W', D], embedded; P or W' is 1.
            queries: int32 [B, P * W'], their positions.
            ancestry: int32 [B, W', T], the slot in which each finds its past at each time.
            cache: positions already hold the new tokens.
        """
        B, W, T = cache.ancestry.shape
        # [B, W', time, slot]: time t is seen in the one slot that the ancestry names.
        own = ancestry[:, :, :, None] == jnp.arange(W, dtype=jnp.int32)
        own &= (cache.positions != EMPTY)[:, None, :, None]
        self_mask = Mask(
            query_positions=queries,
            memory_positions=jnp.repeat(cache.positions, W, axis=1),
            explicit=own.reshape(B, 1, -1, T * W),
            causal=True,
            window=self.config.attention_window,
        )
        cross_mask = None
        if cache.src_mask is not None:
            cross_mask = Mask(explicit=cache.src_mask[:, None, None, :])
        bias = self._relative_bias("decoder")
        past = list(cache.past)
        for i, layer in enumerate(self.decoder):
            cross = cache.cross[i] if cache.cross else None
            x, past[i] = layer.step(x, past[i], cache.index, self_mask, bias, cross, cross_mask, W)
        return self._final_norm(x), cache._replace(past=tuple(past))

    def _embed(
        self,
        stack: str,
        ids: jax.Array,
        positions: jax.Array | None,
        length: int,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """Embedding times sqrt(d_model), plus positions (sections 3.4 and 3.5): [..., D].

        Positions are below `length`; None: 0, 1, 2, ... along the last axis of ids.
        """
        c = self.config
        x = (self.source_table if stack == "encoder" else self.target_table)[ids]
        if c.embedding_scale:
            x *= c.d_model**0.5
        if positions is None:
            positions = jnp.arange(ids.shape[-1], dtype=jnp.int32)
        positions += c.position_offset
        if c.positions == "sinusoidal":
            x += sinusoids_at(positions, length + c.position_offset, c)
        elif c.positions == "learned":
            _require_known(c, length)
            x += getattr(self, f"{stack}_positions")[positions]
        x = x.astype(jnp.dtype(c.dtype))
        return spread_rows(dropout(x, c.embedding_dropout, None if drop is None else drop.fold(0)))

    def _stack(
        self,
        stack: str,
        call: Callable[[Any, jax.Array, DropoutKey | None], jax.Array],
        x: jax.Array,
        drop: DropoutKey | None,
    ) -> jax.Array:
        """x [B, T, D] through all layers of a stack: unrolled, or as a scan over their parameters.

        Parameters are stored layer by layer either way, and stacked only inside the program: a
        checkpoint does not know how it was trained. Unrolled is faster on a CPU; a TPU program of
        unrolled layers takes minutes to compile.
        """
        c, layers = self.config, getattr(self, stack)
        site = lambda i: None if drop is None else drop.fold(1 + i)
        own_call, call = call, lambda *arguments: spread_rows(own_call(*arguments))
        scanned = c.layers == "scanned" or (c.layers == "auto" and jax.default_backend() == "tpu")
        watched = self.is_initializing() or self.is_mutable_collection("intermediates")
        if watched or not layers or (not scanned and c.remat == "none"):
            for i, layer in enumerate(layers):
                x = call(layer, x, site(i))
            return x
        pure = nn.apply(call, layers[0].clone(parent=None))
        run = lambda params, x, i: cast(jax.Array, pure({"params": params}, x, site(i)))
        if c.remat != "none":
            dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            # Inside a scan nothing can be shared between forward and backward pass anyway.
            run = jax.checkpoint(
                run, policy=dots if c.remat == "dots" else None, prevent_cse=not scanned
            )
        params = [self.variables["params"][f"{stack}_{i}"] for i in range(len(layers))]
        if not scanned:
            for i, own in enumerate(params):
                x = run(own, x, i)
            return x
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
        numbers = jnp.arange(len(layers), dtype=jnp.uint32)
        x, _ = lax.scan(lambda x, layer: (run(layer[0], x, layer[1]), None), x, (stacked, numbers))
        return x

    def _relative_bias(self, stack: str) -> RelativeBias | None:
        c = self.config
        if c.positions != "relative":
            return None
        table = getattr(self, f"{stack}_relative_bias")
        return RelativeBias(table, stack == "encoder", c.relative_max_distance)

    def _final_norm(self, x: jax.Array) -> jax.Array:
        return self.decoder_norm(x) if self.config.norm_position == "pre" else x


def _require_known(config: ModelConfig, length: int) -> None:
    """Learned positions end somewhere; all other kinds go on."""
    length += config.position_offset
    if config.positions == "learned" and length > config.max_positions:
        raise ConfigError(
            f"--model.max-positions: got {config.max_positions}, "
            f"allowed: at least {length}, the length asked for (learned positions)"
        )


@dataclass(frozen=True)
class Model:
    """The pure functions of a Transformer: parameters in, arrays out, nothing remembered.

    `params` is the plain tree of float32 arrays, as `init` makes it and checkpoints hold it.
    """

    config: ModelConfig

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters."""
        return nn.unbox(self._boxed(key))

    def _boxed(self, key: jax.Array) -> Params:
        ids = jnp.zeros((1, 1), jnp.int32)
        source = ids if self.config.encoder_layers else None
        return self._module.init(key, source, ids)["params"]

    def abstract_params(self) -> Params:
        """Shapes and types of the parameters, without allocating any."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """For each parameter a PartitionSpec of logical axis names, one for each dimension."""
        return nn.get_partition_spec(jax.eval_shape(self._boxed, jax.random.key(0)))

    @property
    def _module(self) -> Transformer:
        return Transformer(self.config)

    def _call(self, method: str, params: Params, *args: Any, **kwargs: Any) -> Any:
        return self._module.apply({"params": params}, *args, method=method, **kwargs)

    def apply(
        self, params: Params, src_ids: jax.Array | None, tgt_in_ids: jax.Array, *args, **kwargs
    ) -> jax.Array:
        """Logits float32 [B, T, V]; further arguments as in Transformer.__call__."""
        return self._call("__call__", params, src_ids, tgt_in_ids, *args, **kwargs)

    def hidden(self, params: Params, batch: Batch, drop: DropoutKey | None = None) -> jax.Array:
        """Decoder output [B, T, D] of a training batch."""
        return self._call(
            "hidden",
            params,
            batch.src_ids,
            batch.tgt_in_ids,
            batch.src_segments,
            batch.tgt_segments,
            batch.src_positions,
            batch.tgt_positions,
            drop,
        )

    def attention_weights(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
        """All attention weights of a batch, such as "decoder_0.cross_attention" [B, H, T, S]."""
        arguments = (batch.src_ids, batch.tgt_in_ids, batch.src_segments, batch.tgt_segments)
        positions = (batch.src_positions, batch.tgt_positions)
        _, kept = cast(Any, self._module.apply)(
            {"params": params},
            *arguments,
            *positions,
            method="hidden",
            mutable=["intermediates"],
        )
        return {
            f"{layer}.{name}": kinds["weights"][0]
            for layer, sublayers in kept["intermediates"].items()
            for name, kinds in sublayers.items()
        }

    def output_projection(self, params: Params) -> tuple[jax.Array, jax.Array | None]:
        """The [V, D] matrix, and the [V] bias or None, that turn decoder output into logits."""
        table = params["output_embedding" if "output_embedding" in params else "embedding"]
        return table, params.get("output_bias")

    def encode(self, params: Params, src_ids: jax.Array, src_mask: jax.Array) -> jax.Array:
        """Transformer.encode: memory [B, S, D]."""
        return self._call("encode", params, src_ids, src_mask)

    def init_cache(
        self,
        params: Params,
        memory: jax.Array | None,
        src_mask: jax.Array | None,
        max_len: int,
        beam_size: int = 1,
        batch_size: int | None = None,
    ) -> DecodeCache:
        """Transformer.init_cache: an empty cache, cross-attention projected once."""
        return self._call("init_cache", params, memory, src_mask, max_len, beam_size, batch_size)

    def prefill(
        self,
        params: Params,
        tgt_ids: jax.Array,
        cache: DecodeCache,
        tgt_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, DecodeCache]:
        """Transformer.prefill: logits [B, P, V] and the cache."""
        return self._call("prefill", params, tgt_ids, cache, tgt_mask)

    def decode_step(
        self, params: Params, token: jax.Array, parent: jax.Array | None, cache: DecodeCache
    ) -> tuple[jax.Array, DecodeCache]:
        """Transformer.decode_step: logits [B, W, V] and the cache."""
        return self._call("decode_step", params, token, parent, cache)
