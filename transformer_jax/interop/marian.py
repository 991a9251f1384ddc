"""Marian and OPUS-MT models in and out, as directories of transformers' MarianMTModel.

The format holds post-norm Transformers with biases and sinusoids whose sines come before the
cosines. The sinusoids of the paper alternate; an exported model has the axis D of every parameter
in the other order, which changes nothing else. What the format cannot say stands under the key
"transformer_jax" of config.json, so that a model comes back as it went.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from transformer_jax.config import Config, ConfigError, DataConfig, ModelConfig
from transformer_jax.data.tokenizer import OURS, Pieces, SpecialIds, Tokenizer
from transformer_jax.decode.trained import Trained
from transformer_jax.interop import bart
from transformer_jax.interop.directory import new_directory, read_file, read_json, write_json
from transformer_jax.interop.tensors import read_tensors, write_safetensors
from transformer_jax.interop.weights import flatten, unflatten, write_run
from transformer_jax.model import Model

logger = logging.getLogger(__name__)

_KEY = "transformer_jax"  # of config.json
_REMEMBERED = ("sinusoid_order", "norm_epsilon", "attention_bias", "ff_bias", "logits_bias")
_UNKNOWN_LANGUAGE = "und"  # ISO 639: undetermined


# ---- In -----------------------------------------------------------------------------------------


def import_marian(source: Path, output: Path) -> None:
    """A run directory of a Marian directory.

    Raises:
        ConfigError: something is missing, damaged, or cannot be carried over; nothing is written.
    """
    settings = bart.read_settings(source, "marian")
    for name in ("normalize_before", "add_final_layer_norm"):
        settings.require(name, False, False)
    model = _model_config(settings)
    tokenizer = _read_tokenizer(settings, model)
    params = bart.params_from(read_tensors(source), model, str(source))
    model, params = _as_it_went(settings, model, params)
    longest = settings.number("max_position_embeddings", 512)
    given = settings.tokenizer
    languages = {name: given[name] for name in ("source_lang", "target_lang") if given.get(name)}
    data = DataConfig(
        **{
            "source_lang": _UNKNOWN_LANGUAGE,
            "target_lang": _UNKNOWN_LANGUAGE,
            **languages,
            "max_source_tokens": longest,
            "max_target_tokens": longest,
        }
    )
    decode = bart.decode_config(settings)
    write_run(output, params, Config(model=model, data=data, decode=decode), tokenizer)


def _model_config(settings: bart.Settings) -> ModelConfig:
    shared = settings.require("share_encoder_decoder_embeddings", True, True, False)
    tied = settings.require("tie_word_embeddings", True, True, False)
    rows = settings.number("vocab_size")
    target_rows = rows if shared else settings.number("decoder_vocab_size", rows)
    return bart.model_config(
        settings,
        vocab_size=target_rows,
        source_vocab_size=rows if rows != target_rows else 0,
        tied_embeddings="none" if not tied else "all" if shared else "decoder",
        logits_bias=True,
    )


def _read_tokenizer(settings: bart.Settings, model: ModelConfig) -> Tokenizer:
    where = settings.where
    path = where / "vocab.json"
    vocabulary = read_json(path)
    rows = model.source_vocab_size or model.vocab_size
    names = bart.numbering(path, vocabulary, rows)
    special = bart.special_ids(settings, vocabulary, model.vocab_size, bart.without_piece(names))
    tags = {
        piece[2:-2]: number
        for piece, number in vocabulary.items()
        if piece.startswith(">>") and piece.endswith("<<")
    }
    target_names = names
    if settings.tokenizer.get("separate_vocabs"):
        path = where / "target_vocab.json"
        target_names = bart.numbering(path, read_json(path), model.vocab_size)
    models = [read_file(where / name) for name in ("source.spm", "target.spm")]
    never = special.all | set(tags.values())

    def side(name: str, content: bytes, numbers: list[str]) -> Pieces:
        try:
            own = Pieces(content)
        except RuntimeError:
            raise ConfigError(
                f"{where / name}: cannot be read: not a SentencePiece model"
            ) from None
        if special == OURS and numbers == [own.piece(i) for i in range(own.size)]:
            return own
        return Pieces(content, numbers, special.unk, never)

    source = side("source.spm", models[0], names)
    target = source
    if models[1] != models[0] or target_names != names:
        target = side("target.spm", models[1], target_names)
    return Tokenizer(source, target, tags, "source", special)


def _as_it_went(
    settings: bart.Settings, model: ModelConfig, params: Any
) -> tuple[ModelConfig, Any]:
    """Undo what export_marian did, for a model that came from here."""
    remembered = settings.config.get(_KEY)
    if not isinstance(remembered, dict):
        return model, params
    flat = flatten(params)
    kept: dict[str, Any] = {}
    for field in ("attention_bias", "ff_bias", "logits_bias"):
        if remembered.get(field) is False:
            ends = {
                "attention_bias": ("query_bias", "key_bias", "value_bias", "out_bias"),
                "ff_bias": ("inner_bias", "outer_bias"),
                "logits_bias": ("output_bias",),
            }[field]
            biases = [name for name in flat if name.endswith(ends)]
            if not any(flat[name].any() for name in biases):  # nobody has trained them since
                kept[field] = False
                flat = {name: x for name, x in flat.items() if name not in biases}
    if remembered.get("norm_epsilon"):
        kept["norm_epsilon"] = float(remembered["norm_epsilon"])
    model = dataclasses.replace(model, **kept)
    params = unflatten(flat)
    if remembered.get("sinusoid_order") == "interleaved":
        order = np.argsort(_concatenated(model.d_model))
        params = _reorder(params, model, order)
        model = dataclasses.replace(model, sinusoid_order="interleaved")
    return model, params


# ---- Out ----------------------------------------------------------------------------------------


def export_marian(trained: Trained, output: Path) -> None:
    """A directory that transformers' MarianMTModel and MarianTokenizer load.

    Raises:
        ConfigError: what of the model the format cannot hold.
    """
    model, tokenizer = trained.config.model, trained.tokenizer
    _require_fit(trained)
    params = trained.params
    if model.sinusoid_order == "interleaved":
        params = _reorder(params, model, _concatenated(model.d_model))
    if model.norm_epsilon != bart.NORM_EPSILON:
        logger.warning(
            "LayerNorm epsilon: %g here, always %g in MarianMTModel: logits differ by about 1e-5",
            model.norm_epsilon,
            bart.NORM_EPSILON,
        )
    tensors = bart.tensors_from(flatten(params), model)
    for name, rows in (
        ("model.shared.weight", tokenizer.vocab_size),
        ("model.encoder.embed_tokens.weight", tokenizer.source_vocab_size),
        ("model.decoder.embed_tokens.weight", tokenizer.vocab_size),
        ("lm_head.weight", tokenizer.vocab_size),
    ):
        if name in tensors:
            tensors[name] = tensors[name][:rows]
    tensors["final_logits_bias"] = tensors["final_logits_bias"][:, : tokenizer.vocab_size]
    with new_directory(output) as directory:
        write_safetensors(directory / "model.safetensors", tensors)
        write_json(directory / "config.json", _their_config(trained))
        write_json(directory / "generation_config.json", _their_generation(trained))
        _write_tokenizer(trained, directory)


def _require_fit(trained: Trained) -> None:
    """Everything in which the format has no choice."""
    c, head = trained.config.model, trained.config.model.d_model // trained.config.model.num_heads
    faults = [
        f"--model.{field.replace('_', '-')}: got {getattr(c, field)!r}, allowed: {allowed[0]!r}"
        for field, *allowed in (
            ("norm_position", "post"),
            ("norm", "layernorm"),
            ("attention", "softmax"),
            ("attention_window", 0),
            ("num_kv_heads", 0, c.num_heads),
            ("d_k", 0, head),
            ("d_v", 0, head),
            ("positions", "sinusoidal"),
            ("sinusoid_exponent", "2i/d"),
            ("position_offset", 0),
            ("activation", *dict.fromkeys(bart.ACTIVATIONS.values())),
        )
        if getattr(c, field) not in allowed
    ]
    if not c.encoder_layers:
        faults.append("--model.encoder-layers: got 0, allowed: a model with an encoder")
    if trained.tokenizer.tags and trained.tokenizer.tag_place != "source":
        faults.append("language tags on both sides, allowed: on the source alone")
    if faults:
        raise ConfigError("Marian's format cannot hold this model: " + "; ".join(faults))


def _their_config(trained: Trained) -> dict[str, Any]:
    c, special = trained.config.model, trained.tokenizer.special
    name = next(theirs for theirs, our in bart.ACTIVATIONS.items() if our == c.activation)
    longest = max(trained.config.data.max_source_tokens, trained.config.data.max_target_tokens)
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": trained.tokenizer.source_vocab_size,
        "decoder_vocab_size": trained.tokenizer.vocab_size,
        "share_encoder_decoder_embeddings": c.tied_embeddings == "all",
        "tie_word_embeddings": c.tied_embeddings != "none",
        "d_model": c.d_model,
        "encoder_layers": c.encoder_layers,
        "decoder_layers": c.decoder_layers,
        "encoder_attention_heads": c.num_heads,
        "decoder_attention_heads": c.num_heads,
        "encoder_ffn_dim": c.d_ff,
        "decoder_ffn_dim": c.d_ff,
        "activation_function": name,
        "scale_embedding": c.embedding_scale,
        "max_position_embeddings": max(512, longest + trained.config.decode.max_extra_tokens + 1),
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
        "activation_dropout": c.activation_dropout,
        "is_encoder_decoder": True,
        "use_cache": True,
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
        "bos_token_id": None,
        "decoder_start_token_id": special.start,
        "forced_eos_token_id": None,
        "dtype": "float32",
        _KEY: {field: getattr(c, field) for field in _REMEMBERED},
    }


def _their_generation(trained: Trained) -> dict[str, Any]:
    special, decode = trained.tokenizer.special, trained.config.decode
    if decode.length_penalty_form == "paper" and decode.length_penalty:
        logger.warning(
            "length penalty: ((5 + length) / 6) ** %g here becomes length ** %g in transformers",
            decode.length_penalty,
            decode.length_penalty,
        )
    longest = max(512, trained.config.data.max_target_tokens)
    return {
        "pad_token_id": special.pad,
        "eos_token_id": special.eos,
        "decoder_start_token_id": special.start,
        "forced_eos_token_id": None,
        "bad_words_ids": [[token] for token in special.forbidden] or None,
        "num_beams": decode.beam_size,
        "length_penalty": decode.length_penalty,
        "early_stopping": bart.early_stopping(decode),
        "max_length": longest,
    }


def _write_tokenizer(trained: Trained, directory: Path) -> None:
    """MarianTokenizer's files."""
    tokenizer = trained.tokenizer
    source, target = tokenizer.source, tokenizer.target
    vocabularies = [{side.piece(i): i for i in range(side.size)} for side in (source, target)]
    separate = vocabularies[0] != vocabularies[1]
    write_json(directory / "vocab.json", vocabularies[0])
    if separate:
        write_json(directory / "target_vocab.json", vocabularies[1])
    (directory / "source.spm").write_bytes(source.model)
    (directory / "target.spm").write_bytes(target.model)
    special: SpecialIds = tokenizer.special
    data = trained.config.data
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "MarianTokenizer",
            "source_lang": data.source_lang,
            "target_lang": data.target_lang,
            "unk_token": source.piece(special.unk),
            "eos_token": source.piece(special.eos),
            "pad_token": source.piece(special.pad),
            "model_max_length": data.max_source_tokens,
            "separate_vocabs": separate,
        },
    )


def _concatenated(d_model: int) -> np.ndarray:
    """The order of D that puts the sines of alternating sinusoids before the cosines."""
    return np.arange(d_model).reshape(-1, 2).T.reshape(-1)


def _reorder(params: Any, model: ModelConfig, order: np.ndarray) -> Any:
    """Every axis D of every parameter in another order: the same function, but for positions."""

    def reorder(axes: PartitionSpec, array: Any) -> np.ndarray:
        array = np.asarray(array)
        for number, name in enumerate(axes):
            if name == "embed":
                array = array.take(order, number)
        return array

    axes = Model(model).logical_axes()
    return jax.tree.map(reorder, axes, params, is_leaf=lambda x: isinstance(x, PartitionSpec))
