"""Models out to CTranslate2, through its own specification classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import ConfigError, ModelConfig
from transformer_jax.decode.trained import Trained
from transformer_jax.interop.directory import new_directory
from transformer_jax.interop.tensors import optional_library
from transformer_jax.interop.weights import flatten
from transformer_jax.model.positions import sinusoids

_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELUTanh",
    "silu": "SWISH",
    "swiglu": "SWISH",
    "geglu": "GELUTanh",
}
_LEAST_POSITIONS = 2048  # rows of the table of positions: no sequence there may be longer


def export_ctranslate2(trained: Trained, output: Path, quantization: str | None = None) -> None:
    """A directory that ctranslate2.Translator loads, with the SentencePiece models beside it.

    It wants source pieces without EOS, which it adds, and gives target pieces.

    Args:
        trained: the model.
        output: a new directory.
        quantization: of the weights; None: float32.

    Raises:
        ConfigError: ctranslate2 is not installed, or the model is of a kind that it has not.
    """
    _require_fit(trained)
    library = optional_library("ctranslate2", "ctranslate2")
    c, tokenizer = trained.config.model, trained.tokenizer
    flat = flatten(trained.params)
    spec = _specification(library.specs, c)
    _fill(library, spec, flat, trained)
    source, target = tokenizer.source, tokenizer.target
    spec.register_source_vocabulary([source.piece(i) for i in range(source.size)])
    spec.register_target_vocabulary([target.piece(i) for i in range(target.size)])
    special = tokenizer.special
    spec.config.unk_token = target.piece(special.unk)
    spec.config.eos_token = target.piece(special.eos)
    spec.config.bos_token = target.piece(special.start)
    spec.config.decoder_start_token = target.piece(special.start)
    spec.config.add_source_bos = False
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = c.norm_epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    with new_directory(output) as directory:
        spec.save(str(directory))
        (directory / "source.spm").write_bytes(source.model)
        (directory / "target.spm").write_bytes(target.model)


def _require_fit(trained: Trained) -> None:
    c, head = trained.config.model, trained.config.model.d_model // trained.config.model.num_heads
    faults = [
        f"--model.{field.replace('_', '-')}: got {getattr(c, field)!r}, allowed: {allowed[0]!r}"
        for field, *allowed in (
            ("attention", "softmax"),
            ("attention_window", 0),
            ("num_kv_heads", 0, c.num_heads),
            ("d_k", 0, head),
            ("d_v", 0, head),
            ("positions", "sinusoidal", "learned", "none"),
        )
        if getattr(c, field) not in allowed
    ]
    if not c.encoder_layers:
        faults.append("--model.encoder-layers: got 0, allowed: a model with an encoder")
    if faults:
        raise ConfigError("CTranslate2 cannot hold this model: " + "; ".join(faults))


def _specification(specs: Any, c: ModelConfig) -> Any:
    return specs.TransformerSpec.from_config(
        (c.encoder_layers, c.decoder_layers),
        c.num_heads,
        pre_norm=c.norm_position == "pre",
        activation=specs.Activation[_ACTIVATIONS[c.activation]],
        ffn_glu=c.activation in ("swiglu", "geglu"),
        rms_norm=c.norm == "rmsnorm",
    )


def _fill(library: Any, spec: Any, flat: Mapping[str, np.ndarray], trained: Trained) -> None:
    """Every parameter to its place."""
    c, tokenizer = trained.config.model, trained.tokenizer

    def norm(into: Any, name: str) -> None:
        into.gamma = flat[f"{name}.scale"]
        if c.norm != "rmsnorm":
            into.beta = flat[f"{name}.bias"]

    def linear(into: Any, *names: str, contract: int = 1) -> None:
        """Kernels [inputs, outputs...], side by side, as one [outputs, inputs]."""
        kernels = [flat[name] for name in names]
        inputs = int(np.prod(kernels[0].shape[:contract]))
        into.weight = np.concatenate([k.reshape(inputs, -1) for k in kernels], 1).T.copy()
        if f"{names[0]}_bias" in flat:
            into.bias = np.concatenate([flat[f"{name}_bias"].reshape(-1) for name in names])

    for name, stack, depth in (
        ("encoder", spec.encoder, c.encoder_layers),
        ("decoder", spec.decoder, c.decoder_layers),
    ):
        stack.scale_embeddings = c.embedding_scale
        table = _positions(flat, trained, name)
        stack.position_encodings.encodings = table
        if c.norm_position == "pre":
            norm(stack.layer_norm, f"{name}_norm")
        for i in range(depth):
            here, layer = f"{name}_{i}", stack.layer[i]
            at = f"{here}.self_attention"
            linear(layer.self_attention.linear[0], f"{at}.query", f"{at}.key", f"{at}.value")
            linear(layer.self_attention.linear[1], f"{at}.out", contract=2)
            norm(layer.self_attention.layer_norm, f"{at}_norm")
            if name == "decoder":
                at = f"{here}.cross_attention"
                linear(layer.attention.linear[0], f"{at}.query")
                linear(layer.attention.linear[1], f"{at}.key", f"{at}.value")
                linear(layer.attention.linear[2], f"{at}.out", contract=2)
                norm(layer.attention.layer_norm, f"{at}_norm")
            at = f"{here}.feed_forward"
            gated = c.activation in ("swiglu", "geglu")
            # Where there is a gate, CTranslate2 activates its first matrix.
            linear(layer.ffn.linear_0, f"{at}.gate" if gated else f"{at}.inner")
            if gated:
                linear(layer.ffn.linear_0_noact, f"{at}.inner")
            linear(layer.ffn.linear_1, f"{at}.outer")
            norm(layer.ffn.layer_norm, f"{at}_norm")
    rows, target = tokenizer.vocab_size, flat["embedding"]
    source = flat.get("source_embedding", target)
    # Copies: CTranslate2 quantizes each array where it stands.
    spec.encoder.embeddings[0].weight = source[: tokenizer.source_vocab_size].copy()
    spec.decoder.embeddings.weight = target[:rows].copy()
    spec.decoder.projection.weight = flat.get("output_embedding", target)[:rows].copy()
    if c.logits_bias:
        spec.decoder.projection.bias = flat["output_bias"][:rows]


def _positions(flat: Mapping[str, np.ndarray], trained: Trained, stack: str) -> np.ndarray:
    """The table of what is added at each position, float32 [positions, D]."""
    c, data = trained.config.model, trained.config.data
    if c.positions == "learned":
        return flat[f"{stack}_positions"][c.position_offset :]
    longest = max(data.max_source_tokens, data.max_target_tokens)
    rows = max(_LEAST_POSITIONS, longest + trained.config.decode.max_extra_tokens)
    if c.positions == "none":
        return np.zeros((rows, c.d_model), np.float32)
    numbers = np.arange(c.position_offset, c.position_offset + rows)
    table = sinusoids(numbers, c.d_model, c.sinusoid_order, c.sinusoid_exponent)
    return table.astype(np.float32)
