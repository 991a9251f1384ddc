"""The encoder and decoder stacks (section 3.1), embeddings (3.4), pure functions on them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.config import ModelConfig
from transformer_jax.model.dropout import DropoutKey, dropout
from transformer_jax.model.layers import DecoderLayer, EncoderLayer, Norm, declare, sinusoids
from transformer_jax.model.masks import causal_mask, segment_mask
from transformer_jax.types import Batch

Params = Any  # nested dict of arrays

# Dropout sites of the two stacks; layer i of a stack is site + 1 + i.
ENCODER, DECODER = 0, 1000


class DecodeCache(NamedTuple):
    """What decoding remembers: a value that goes in and comes out.

    Keys and values of the hypotheses are never reordered. A hypothesis in slot w at time t finds
    its own past through `ancestry`, which says in which slot it stood at each earlier time.
    """

    self_keys: tuple[jax.Array, ...]  # L x [B, H, W, T, K]
    self_values: tuple[jax.Array, ...]  # L x [B, H, W, T, K]
    cross_keys: tuple[jax.Array, ...]  # L x [B, H, S, K], one for all beams of a sentence
    cross_values: tuple[jax.Array, ...]  # L x [B, H, S, K]
    src_mask: jax.Array | None  # bool [B, S]
    ancestry: jax.Array  # int32 [B, W, T]
    occupied: jax.Array  # bool [B, T]: times that hold a token, not prompt padding
    positions: jax.Array  # int32 [B]: position of the next token of each sentence
    index: jax.Array  # int32 []: time at which the next token is written


class Transformer(nn.Module):
    """The whole of Figure 1. Each method is a pure function of (parameters, arguments)."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        init, axes = nn.initializers.normal(c.d_model**-0.5), ("vocab", "embed")
        shape = (c.vocab_size, c.d_model)
        self.target_table = declare(self, "embedding", init, shape, axes)
        self.source_table = self.output_table = self.target_table
        if c.encoder_layers and c.tied_embeddings != "all":
            self.source_table = declare(self, "source_embedding", init, shape, axes)
        if c.tied_embeddings == "none":
            self.output_table = declare(self, "output_embedding", init, shape, axes)
        self.encoder = [EncoderLayer(c) for _ in range(c.encoder_layers)]
        self.decoder = [DecoderLayer(c) for _ in range(c.decoder_layers)]
        if c.norm_position == "pre":
            self.decoder_norm = Norm(c)
            if c.encoder_layers:
                self.encoder_norm = Norm(c)

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
        return self.logits(
            self.hidden(
                src_ids,
                tgt_in_ids,
                src_segments,
                tgt_segments,
                src_positions,
                tgt_positions,
                drop,
            )
        )

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
        if src_ids is not None:
            if src_segments is None:
                src_segments = jnp.ones_like(src_ids)
            memory = self.encode_segments(src_ids, src_segments, src_positions, drop)
            cross_mask = segment_mask(tgt_segments, src_segments)
        self_mask = segment_mask(tgt_segments, tgt_segments) & causal_mask(tgt_in_ids.shape[1])
        drop = None if drop is None else drop.fold(DECODER)
        x = self._embed(self.target_table, tgt_in_ids, tgt_positions, tgt_in_ids.shape[1], drop)
        for i, layer in enumerate(self.decoder):
            layer_drop = None if drop is None else drop.fold(1 + i)
            x = layer(x, self_mask, memory, cross_mask, layer_drop)
        return self._final_norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 [..., V]: the embedding table transposed, not scaled."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        table = self.output_table.astype(hidden.dtype)
        product = jnp.einsum("ND,VD->NV", flat, table, preferred_element_type=jnp.float32)
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
        mask = segment_mask(src_segments, src_segments)
        drop = None if drop is None else drop.fold(ENCODER)
        x = self._embed(self.source_table, src_ids, src_positions, src_ids.shape[1], drop)
        for i, layer in enumerate(self.encoder):
            x = layer(x, mask, None if drop is None else drop.fold(1 + i))
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
        B = batch_size if memory is None else memory.shape[0]
        assert B is not None, "a decoder-only model needs batch_size"
        K, U = c.d_k or c.d_model // c.num_heads, c.d_v or c.d_model // c.num_heads
        cross = [] if memory is None else [layer.project_memory(memory) for layer in self.decoder]

        def empty(width: int) -> tuple[jax.Array, ...]:
            shape = (B, c.num_heads, beam_size, max_len, width)
            return tuple(jnp.zeros(shape, jnp.dtype(c.dtype)) for _ in self.decoder)

        return DecodeCache(
            self_keys=empty(K),
            self_values=empty(U),
            cross_keys=tuple(key for key, _ in cross),
            cross_values=tuple(value for _, value in cross),
            src_mask=src_mask,
            ancestry=jnp.zeros((B, beam_size, max_len), jnp.int32),
            occupied=jnp.zeros((B, max_len), bool),
            positions=jnp.zeros((B,), jnp.int32),
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
        W, T = cache.ancestry.shape[1:]
        if tgt_mask is None:
            tgt_mask = jnp.ones((B, P), bool)
        visible = segment_mask(tgt_mask.astype(jnp.int32), tgt_mask.astype(jnp.int32))
        visible = jnp.pad(visible & causal_mask(P), ((0, 0), (0, 0), (0, 0), (0, T - P)))
        mask = jnp.pad(visible[:, :, :, None], ((0, 0),) * 3 + ((0, W - 1), (0, 0)))
        x = self._embed(self.target_table, tgt_ids, None, P)
        x, cache = self._cached_layers(x[:, None], cache, mask.reshape(B, 1, P, W * T))
        cache = cache._replace(
            occupied=cache.occupied.at[:, :P].set(tgt_mask),
            positions=tgt_mask.sum(1, dtype=jnp.int32),
            index=jnp.asarray(P, jnp.int32),
        )
        return self.logits(x[:, 0]), cache

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
        T = cache.ancestry.shape[2]
        ancestry = cache.ancestry
        if parent is not None:
            ancestry = jnp.take_along_axis(ancestry, parent[:, :, None], axis=1)
        own = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32)[None, :, None], (B, W, 1))
        ancestry = lax.dynamic_update_slice_in_dim(ancestry, own, cache.index, 2)
        new = jnp.ones((B, 1), bool)
        occupied = lax.dynamic_update_slice_in_dim(cache.occupied, new, cache.index, 1)
        # [B, W, slot, time]: hypothesis w sees time t in the one slot that its ancestry names.
        slots = jnp.arange(W, dtype=jnp.int32)[None, None, :, None]
        mask = (ancestry[:, :, None, :] == slots) & occupied[:, None, None, :]
        x = self._embed(self.target_table, token, cache.positions[:, None], T)
        x, cache = self._cached_layers(x[:, :, None], cache, mask.reshape(B, 1, W, W * T))
        cache = cache._replace(
            ancestry=ancestry,
            occupied=occupied,
            positions=cache.positions + 1,
            index=cache.index + 1,
        )
        return self.logits(x[:, :, 0]), cache

    def _cached_layers(
        self, x: jax.Array, cache: DecodeCache, mask: jax.Array
    ) -> tuple[jax.Array, DecodeCache]:
        """x [B, W', P, D] through the decoder beside the cache; keys and values are added."""
        cross_mask = None if cache.src_mask is None else cache.src_mask[:, None, None, :]
        keys, values = list(cache.self_keys), list(cache.self_values)
        for i, layer in enumerate(self.decoder):
            cross = (cache.cross_keys[i], cache.cross_values[i]) if cache.cross_keys else None
            past = (keys[i], values[i])
            x, (keys[i], values[i]) = layer.step(x, past, cache.index, mask, cross, cross_mask)
        cache = cache._replace(self_keys=tuple(keys), self_values=tuple(values))
        return self._final_norm(x), cache

    def _embed(
        self,
        table: jax.Array,
        ids: jax.Array,
        positions: jax.Array | None,
        length: int,
        drop: DropoutKey | None = None,
    ) -> jax.Array:
        """Embedding times sqrt(d_model), plus positions (sections 3.4 and 3.5): [..., D].

        Positions are below `length`; None: 0, 1, 2, ... along the last axis of ids.
        """
        c = self.config
        x = table[ids]
        if c.embedding_scale:
            x *= c.d_model**0.5
        if c.positions == "sinusoidal":
            encodings = jnp.asarray(sinusoids(length, c.d_model))
            x += encodings if positions is None else encodings[positions]
        x = x.astype(jnp.dtype(c.dtype))
        return dropout(x, c.embedding_dropout, None if drop is None else drop.fold(0))

    def _final_norm(self, x: jax.Array) -> jax.Array:
        return self.decoder_norm(x) if self.config.norm_position == "pre" else x


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

    def output_table(self, params: Params) -> jax.Array:
        """The [V, D] matrix that turns decoder output into logits."""
        return params["output_embedding" if "output_embedding" in params else "embedding"]

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
