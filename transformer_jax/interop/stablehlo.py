"""Models out as StableHLO: encoder and decoding step as programs for any batch and any length.

The programs are what jax.export writes: they run where jax is, on CPU, GPU or TPU, without this
project. The directory holds them, the weights, the SentencePiece models, and translate.py, which
shows how they are called.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from transformer_jax.config import ConfigError
from transformer_jax.decode.trained import Trained
from transformer_jax.interop.directory import new_directory, write_json
from transformer_jax.interop.tensors import optional_library
from transformer_jax.interop.weights import flatten, unflatten
from transformer_jax.model import Model
from transformer_jax.model.layers import KeysAndValues
from transformer_jax.model.transformer import EMPTY, DecodeCache

PLATFORMS = ("cpu", "cuda", "tpu")
_SCRIPT = Path(__file__).with_name("stablehlo_example.py.txt")

Arrays = dict[str, Any]


def export_stablehlo(trained: Trained, output: Path) -> None:
    """A directory of programs, weights and vocabularies.

    encode.stablehlo: (weights, src_ids int32 [B, S], src_mask bool [B, S]) -> source, whatever the
    step needs of it. decode_step.stablehlo: (weights, token int32 [B], time int32 [], past,
    source) -> (logits float32 [B, V], past). past is a list with a pair of arrays for each layer,
    zeros at first: keys [B, G, K, T] and values [B, G, T, U], for T tokens at most. Each row of a
    batch is one hypothesis; a beam search takes rows of past and source along their first axis.

    Raises:
        ConfigError: the model has no encoder.
    """
    if not trained.config.model.encoder_layers:
        raise ConfigError("--model.encoder-layers: got 0, allowed: a model with an encoder")
    optional_library("flatbuffers", "flatbuffers")
    programs = _Programs(trained)
    tokenizer, c = trained.tokenizer, trained.config.model
    special = tokenizer.special
    flat = flatten(trained.params)
    encode = programs.encode(flat)
    step = programs.decode_step(flat, encode)
    settings = {
        "pad": special.pad,
        "eos": special.eos,
        "unk": special.unk,
        "start": special.start,
        "forbidden": [*special.forbidden, *range(tokenizer.vocab_size, c.vocab_size)],
        **_language_tags(trained),
        "past": {"layers": c.decoder_layers, **programs.head_sizes(), "dtype": c.dtype},
        "max_extra_tokens": trained.config.decode.max_extra_tokens,
    }
    with new_directory(output) as directory:
        (directory / "encode.stablehlo").write_bytes(bytes(encode.serialize()))
        (directory / "decode_step.stablehlo").write_bytes(bytes(step.serialize()))
        np.savez(directory / "weights.npz", **flat)  # pyright: ignore[reportArgumentType]
        write_json(directory / "settings.json", settings)
        for name, side in (("source", tokenizer.source), ("target", tokenizer.target)):
            (directory / f"{name}.spm").write_bytes(side.model)
            pieces = {side.piece(i): i for i in range(side.size)}
            write_json(directory / f"{name}_vocabulary.json", pieces)
        (directory / "translate.py").write_bytes(_SCRIPT.read_bytes())


def _language_tags(trained: Trained) -> dict[str, Any]:
    """The tags there are, and those of the run's languages in front of source and target."""
    tokenizer, data = trained.tokenizer, trained.config.data
    try:
        (source,) = tokenizer.encode_source([""], data.source_lang, data.target_lang)
        target = tokenizer.target_prefix(data.target_lang)
    except ConfigError:  # of no language yet: texts name it, as >>deu<<, or settings.json does
        source, target = [tokenizer.eos_id], []
    return {
        "tags": tokenizer.tags,
        "tag_place": tokenizer.tag_place if tokenizer.tags else None,
        "source_prefix": source[:-1],
        "target_prefix": target,
    }


class _Programs:
    """The two functions, on arrays by name and plain tuples alone."""

    def __init__(self, trained: Trained) -> None:
        # The kernels of one kind of device are no program for any device.
        config = dataclasses.replace(trained.config.model, attention_implementation="plain")
        self._model = Model(config)
        known: list[str] = []
        if config.positions == "learned":
            most = config.max_positions - config.position_offset
            known = [f"s <= {most}", f"t <= {most}"]
        self._sizes = export.symbolic_shape("b, s, t", constraints=known)

    def head_sizes(self) -> dict[str, int]:
        """Of keys and values: heads G, widths K and U."""
        c = self._model.config
        width = c.d_model // c.num_heads
        return {"G": c.num_kv_heads or c.num_heads, "K": c.d_k or width, "U": c.d_v or width}

    def encode(self, flat: Arrays) -> export.Exported:
        """The encoder, and the cross-attention's keys and values, projected once."""
        b, s, _ = self._sizes

        def encode(weights: Arrays, src_ids: jax.Array, src_mask: jax.Array) -> Arrays:
            params = unflatten(weights)
            memory = self._model.encode(params, src_ids, src_mask)
            cross = self._model.init_cache(params, memory, src_mask, 1).cross
            return {"cross": [tuple(layer) for layer in cross], "mask": src_mask}

        ids = jax.ShapeDtypeStruct((b, s), jnp.int32)
        mask = jax.ShapeDtypeStruct((b, s), jnp.bool_)
        return export.export(jax.jit(encode), platforms=PLATFORMS)(_shapes(flat), ids, mask)

    def decode_step(self, flat: Arrays, encoded: export.Exported) -> export.Exported:
        """One token for each row."""
        b, _, t = self._sizes
        c = self._model.config

        def step(
            weights: Arrays, token: jax.Array, time: jax.Array, past: Any, source: Any
        ) -> tuple[jax.Array, Any]:
            B, T = token.shape[0], past[0][0].shape[3]
            times = jnp.arange(T, dtype=jnp.int32)
            cache = DecodeCache(
                past=tuple(KeysAndValues(key[:, :, None], value) for key, value in past),
                cross=tuple(KeysAndValues(*layer) for layer in source["cross"]),
                src_mask=source["mask"],
                ancestry=jnp.zeros((B, 1, T), jnp.int32),
                positions=jnp.broadcast_to(jnp.where(times < time, times, EMPTY), (B, T)),
                lengths=jnp.broadcast_to(time, (B,)),
                index=time,
            )
            params = unflatten(weights)
            logits, cache = self._model.decode_step(params, token[:, None], None, cache)
            return logits[:, 0], [(layer.key[:, :, 0], layer.value) for layer in cache.past]

        sizes = self.head_sizes()
        G, K, U = sizes["G"], sizes["K"], sizes["U"]
        dtype = jnp.dtype(c.dtype)
        pair = (
            jax.ShapeDtypeStruct((b, G, K, t), dtype),
            jax.ShapeDtypeStruct((b, G, t, U), dtype),
        )
        source = jax.tree.unflatten(
            encoded.out_tree, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in encoded.out_avals]
        )
        token, time = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((b,), ()))
        past = [pair] * c.decoder_layers
        exported = export.export(jax.jit(step), platforms=PLATFORMS)
        return exported(_shapes(flat), token, time, past, source)


def _shapes(flat: Arrays) -> Arrays:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in flat.items()}
