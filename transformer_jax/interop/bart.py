"""The names, shapes and settings that Marian and M2M100 share in transformers: those of BART."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from transformer_jax.config import ConfigError, DecodeConfig, ModelConfig
from transformer_jax.data.tokenizer import SpecialIds
from transformer_jax.interop.directory import read_json
from transformer_jax.interop.weights import require_fit, shapes_of, unflatten
from transformer_jax.model import Model
from transformer_jax.model.positions import sinusoids

ACTIVATIONS: dict[str, Any] = {
    "relu": "relu",
    "swish": "silu",
    "silu": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
NORM_EPSILON = 1e-5  # of every LayerNorm there, not to be set
# Of early_stopping in generation_config.json: which of our rules of beam search it is.
_RULES: dict[bool | str, Any] = {False: "transformers", True: "ctranslate2", "never": "exact"}
_PARTS = {
    "self_attention": "self_attn",
    "self_attention_norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward_norm": "final_layer_norm",
}
_LEAVES = {
    "query": "q_proj.weight",
    "query_bias": "q_proj.bias",
    "key": "k_proj.weight",
    "key_bias": "k_proj.bias",
    "value": "v_proj.weight",
    "value_bias": "v_proj.bias",
    "out": "out_proj.weight",
    "out_bias": "out_proj.bias",
    "inner": "fc1.weight",
    "inner_bias": "fc1.bias",
    "outer": "fc2.weight",
    "outer_bias": "fc2.bias",
    "scale": "weight",
    "bias": "bias",
}
_SHARED, _LM_HEAD, _LOGITS_BIAS = "model.shared.weight", "lm_head.weight", "final_logits_bias"
_OF_STACK = {
    "source_embedding": "model.encoder.embed_tokens.weight",
    "embedding": "model.decoder.embed_tokens.weight",
}


class Settings(NamedTuple):
    """The configuration files of a directory of transformers."""

    where: Path
    config: dict[str, Any]  # config.json
    generation: dict[str, Any]  # generation_config.json, and where it is silent config.json
    tokenizer: dict[str, Any]  # tokenizer_config.json

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number of config.json."""
        value = self.config.get(name, default)
        if type(value) is not int or value < 0:
            self.refuse(name, value, "a whole number")
        return value

    def require(self, name: str, default: Any, *allowed: Any) -> Any:
        """One of the values that can be carried over."""
        value = self.config.get(name, default)
        if value not in allowed or type(value) not in {type(x) for x in allowed}:
            self.refuse(name, value, " or ".join(map(repr, allowed)))
        return value

    def refuse(self, name: str, got: Any, allowed: str) -> NoReturn:
        """Raise the ConfigError."""
        raise ConfigError(f"{self.where / 'config.json'}: {name}: got {got!r}, allowed: {allowed}")


def read_settings(source: Path, model_type: str) -> Settings:
    """The configuration files of a directory, of the right kind of model."""
    if not source.is_dir():
        raise ConfigError(f"--source: got {source}, allowed: a directory with config.json")
    config = read_json(source / "config.json")
    generation = read_json(source / "generation_config.json", optional=True)
    # Defaults of transformers that stand in neither file are not written.
    known = {**config, **{k: v for k, v in generation.items() if v is not None}}
    tokenizer = read_json(source / "tokenizer_config.json", optional=True)
    settings = Settings(source, config, known, tokenizer)
    settings.require("model_type", None, model_type)
    return settings


def model_config(settings: Settings, **fixed: Any) -> ModelConfig:
    """Our ModelConfig of config.json; `fixed` are the fields in which the kinds of model differ."""
    s = settings
    heads, width = s.number("encoder_attention_heads"), s.number("encoder_ffn_dim")
    s.require("decoder_attention_heads", None, heads)
    s.require("decoder_ffn_dim", None, width)
    for name in ("normalize_embedding", "add_bias_logits"):
        s.require(name, False, False)
    for name in ("static_position_embeddings",):
        s.require(name, True, True)
    activation = s.require("activation_function", "gelu", *ACTIVATIONS)
    dropout = lambda name: float(s.config.get(name) or 0.0)
    return ModelConfig(
        d_model=s.number("d_model"),
        d_ff=width,
        num_heads=heads,
        encoder_layers=s.number("encoder_layers"),
        decoder_layers=s.number("decoder_layers"),
        activation=ACTIVATIONS[activation],
        attention_bias=True,
        norm_epsilon=NORM_EPSILON,
        sinusoid_order="concatenated",
        embedding_scale=s.require("scale_embedding", False, False, True),
        dropout=dropout("dropout"),
        embedding_dropout=dropout("dropout"),
        attention_dropout=dropout("attention_dropout"),
        activation_dropout=dropout("activation_dropout"),
        **fixed,
    )


def decode_config(settings: Settings) -> DecodeConfig:
    """Beam size, length penalty and stopping rule as transformers would generate with them."""
    where = settings.where / "generation_config.json"
    given = settings.generation
    early = given.get("early_stopping", False)
    if not isinstance(early, bool | str) or early not in _RULES:
        raise ConfigError(f"{where}: early_stopping: got {early!r}, allowed: false, true, 'never'")
    beams, alpha = given.get("num_beams", 1), given.get("length_penalty", 1.0)
    if type(beams) is not int or beams < 1:
        raise ConfigError(f"{where}: num_beams: got {beams!r}, allowed: a positive number")
    if type(alpha) not in (int, float):
        raise ConfigError(f"{where}: length_penalty: got {alpha!r}, allowed: a number")
    return DecodeConfig(
        beam_size=beams,
        length_penalty=float(alpha),
        length_penalty_form="power",
        rule=_RULES[early],
    )


def early_stopping(config: DecodeConfig) -> bool | str:
    """The value of early_stopping that is, or comes nearest to, our rule."""
    return next((early for early, rule in _RULES.items() if rule == config.rule), "never")


def special_ids(
    settings: Settings, pieces: Mapping[str, int], size: int, others: Sequence[int] = ()
) -> SpecialIds:
    """Pad, EOS, unknown and decoder start, and what generation must not choose."""
    where = settings.where / "generation_config.json"

    def number(name: str) -> int:
        value: Any = settings.generation.get(name, settings.config.get(name))
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if type(value) is int and 0 <= value < size:
            return value
        settings.refuse(name, value, f"an id below {size}")

    unk: Any = settings.tokenizer.get("unk_token", "<unk>")
    unk = unk.get("content") if isinstance(unk, dict) else unk
    if unk not in pieces:
        raise ConfigError(f"{settings.where / 'vocab.json'}: got no {unk!r}, the unknown token")
    forbidden: list[int] = []
    for word in settings.generation.get("bad_words_ids") or []:
        if not isinstance(word, list) or len(word) != 1:
            raise ConfigError(f"{where}: bad_words_ids: got {word!r}, allowed: lists of one id")
        forbidden += word
    forbidden += settings.generation.get("suppress_tokens") or []
    for token in forbidden:
        if type(token) is not int or not 0 <= token < size:
            raise ConfigError(f"{where}: bad_words_ids: got {token!r}, allowed: an id below {size}")
    return SpecialIds(
        pad=number("pad_token_id"),
        eos=number("eos_token_id"),
        unk=pieces[unk],
        start=number("decoder_start_token_id"),
        forbidden=tuple(sorted(set(forbidden))),
        others=tuple(sorted(set(others))),
    )


def numbering(path: Path, pieces: Mapping[str, Any], size: int) -> list[str]:
    """The piece of each id; ids without one get a name that no text has.

    Raises:
        ConfigError: two pieces of one id, or an id beyond the table.
    """
    found: dict[int, str] = {}
    for piece, number in pieces.items():
        if type(number) is not int or not 0 <= number < size:
            raise ConfigError(f"{path}: {piece!r}: got {number!r}, allowed: an id below {size}")
        if number in found:
            raise ConfigError(f"{path}: id {number}: got {found[number]!r} and {piece!r}")
        found[number] = piece
    return [found.get(i, f"<no piece {i}>") for i in range(size)]


def without_piece(names: Sequence[str]) -> list[int]:
    """Ids to which numbering gave a name of its own."""
    return [i for i, name in enumerate(names) if name == f"<no piece {i}>"]


# ---- Parameters ---------------------------------------------------------------------------------


def their_name(name: str) -> str:
    """encoder_0.self_attention.query -> model.encoder.layers.0.self_attn.q_proj.weight."""
    first, *middle, leaf = name.split(".")
    if first in ("encoder_norm", "decoder_norm"):
        return f"model.{first[:7]}.layer_norm.{_LEAVES[leaf]}"
    stack, _, number = first.partition("_")
    part = _PARTS.get(middle[0], "")
    return ".".join(filter(None, ["model", stack, "layers", number, part, _LEAVES[leaf]]))


def theirs(name: str, array: np.ndarray) -> np.ndarray:
    """One parameter of a layer in their shape: matrices [outputs, inputs], heads side by side."""
    leaf = name.rpartition(".")[2]
    if leaf in ("query", "key", "value"):
        return array.reshape(array.shape[0], -1).T
    if leaf == "out":
        return array.reshape(-1, array.shape[-1]).T
    if leaf in ("inner", "outer"):
        return array.T
    return array.reshape(-1)


def ours(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `theirs`, for a parameter of our shape."""
    return (array.T if array.ndim == 2 else array).reshape(shape)


def params_from(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, where: str
) -> dict[str, Any]:
    """Our parameter tree of their tensors.

    Raises:
        ConfigError: lists names that are missing or cannot be mapped, and shapes that differ.
    """
    left = dict(tensors)
    _drop_positions(left, config, where)
    shapes = shapes_of(Model(config))
    want: dict[str, tuple[int, ...]] = {}  # their names
    tables = {name for name in shapes if "." not in name}
    for name, shape in shapes.items():
        if name not in tables:
            want[their_name(name)] = theirs(name, np.broadcast_to(np.float32(0), shape)).shape
    embeddings = _take_embeddings(left, config, where)
    if config.logits_bias:
        bias = left.pop(_LOGITS_BIAS, None)
        rows = shapes["output_bias"]
        embeddings["output_bias"] = np.zeros(rows, np.float32) if bias is None else bias.reshape(-1)
    have = {name: tensor.shape for name, tensor in left.items()}
    have |= {name: table.shape for name, table in embeddings.items()}
    require_fit(where, have, want | {name: shapes[name] for name in tables})
    layers = {
        name: ours(left[their_name(name)], shape)
        for name, shape in shapes.items()
        if name not in tables
    }
    return unflatten(embeddings | layers)


def _take_embeddings(
    left: dict[str, np.ndarray], config: ModelConfig, where: str
) -> dict[str, np.ndarray]:
    """Our tables out of theirs, which hold the same one several times where it is shared."""
    tied = config.tied_embeddings
    sources = {"embedding": [_OF_STACK["embedding"], _SHARED]}
    if tied == "all":
        sources["embedding"] = [_SHARED, *_OF_STACK.values(), _LM_HEAD]
    else:
        sources["source_embedding"] = [_OF_STACK["source_embedding"], _SHARED]
        if tied == "none":
            sources["output_embedding"] = [_LM_HEAD]
        else:
            sources["embedding"].insert(1, _LM_HEAD)
    found = {}
    for ours_name, names in sources.items():
        present = [name for name in names if name in left]
        if not present:
            raise ConfigError(f"{where}: does not fit: missing {names[0]}")
        found[ours_name] = left[present[0]]
        for other in present[1:]:
            # A shared table beside one of the stack's own is not used in the model.
            same = np.array_equal(left[other], found[ours_name])
            if not same and (tied == "all" or other != _SHARED):
                raise ConfigError(
                    f"{where}: does not fit: {other} differs from {present[0]}, but config.json "
                    "says that they are tied"
                )
    for name in (_SHARED, _LM_HEAD, *_OF_STACK.values()):
        left.pop(name, None)
    return found


def _drop_positions(left: dict[str, np.ndarray], config: ModelConfig, where: str) -> None:
    """Tables of sinusoids are made anew; a learned one would be lost, and is refused."""
    for stack in ("encoder", "decoder"):
        for leaf in ("weight", "weights"):
            name = f"model.{stack}.embed_positions.{leaf}"
            table = left.pop(name, None)
            if table is None:
                continue
            want = sinusoids(
                np.arange(len(table)),
                config.d_model,
                config.sinusoid_order,
                config.sinusoid_exponent,
            )
            first = config.position_offset  # rows before it are never used
            same = table.shape == want.shape
            if not same or not np.allclose(table[first:], want[first:], atol=2e-3):
                raise ConfigError(f"{where}: {name}: got learned positions, allowed: sinusoids")


def tensors_from(flat: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Their tensors of our parameters by name; biases that we do not have are zeros."""
    tables = ("embedding", "source_embedding", "output_embedding", "output_bias")
    found = {their_name(k): theirs(k, v) for k, v in flat.items() if k not in tables}
    for name in [name for name in found if name.endswith("_proj.weight") or ".fc" in name]:
        bias = name.replace(".weight", ".bias")
        found.setdefault(bias, np.zeros(found[name].shape[0], np.float32))
    target = flat["embedding"]
    if config.tied_embeddings == "all":
        found[_SHARED] = target
    else:
        found[_OF_STACK["embedding"]] = target
        found[_OF_STACK["source_embedding"]] = flat["source_embedding"]
        found[_LM_HEAD] = flat.get("output_embedding", target)
    bias = flat.get("output_bias")
    found[_LOGITS_BIAS] = (np.zeros(len(target), np.float32) if bias is None else bias)[None]
    return found
