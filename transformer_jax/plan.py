"""What a run will need, before it is paid for: nothing here touches an accelerator."""

import dataclasses
from typing import Any

import jax

from transformer_jax.config import Config
from transformer_jax.model import Model


def parameters_by_part(config: Config) -> dict[str, int]:
    """Number of parameters of the embeddings, the encoder, the decoder, and in total."""
    vocab_size = config.model.vocab_size or config.tokenizer.vocab_size
    model = Model(dataclasses.replace(config.model, vocab_size=vocab_size))
    parts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract_params()):
        part = str(path[0].key).split("_")[0]
        name = part if part in ("encoder", "decoder") else "embeddings"
        parts[name] = parts.get(name, 0) + leaf.size
    return parts | {"total": sum(parts.values())}


def plan(config: Config) -> dict[str, Any]:
    """Parameters by part, and the bytes of a checkpoint with Adam's two moments (float32)."""
    parameters = parameters_by_part(config)
    return {"parameters": parameters, "checkpoint_bytes": 3 * 4 * parameters["total"]}
