"""Parameters by dotted names, and the flat safetensors file of a run, both ways."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import config as configs
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import Config, ConfigError
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.trained import Trained
from transformer_jax.interop.directory import new_directory, read_file
from transformer_jax.interop.tensors import read_safetensors, write_safetensors
from transformer_jax.model import Model

_FILE = "model.safetensors"
_MOST_NAMES = 40  # of what does not fit, in one message


def flatten(params: Any) -> dict[str, np.ndarray]:
    """encoder_0.self_attention.query and so on, each on the host."""
    leaves = jax.tree.leaves_with_path(params)
    return {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested tree that flatten took apart."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[last] = leaf
    return tree


def shapes_of(model: Model) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of a model."""
    leaves = jax.tree.leaves_with_path(model.abstract_params())
    return {".".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def require_fit(
    where: str, have: Mapping[str, tuple[int, ...]], want: Mapping[str, tuple[int, ...]]
) -> None:
    """Names and shapes must agree.

    Raises:
        ConfigError: lists what is missing, what cannot be mapped, and shapes that differ.
    """
    faults = [f"missing {name}" for name in sorted(want.keys() - have.keys())]
    faults += [f"cannot be mapped: {name}" for name in sorted(have.keys() - want.keys())]
    faults += [
        f"{name} has shape {tuple(have[name])}, the model {tuple(want[name])}"
        for name in sorted(want.keys() & have.keys())
        if tuple(have[name]) != tuple(want[name])
    ]
    if faults:
        more = len(faults) - _MOST_NAMES
        shown = faults[:_MOST_NAMES] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError(f"{where}: does not fit: " + "; ".join(shown))


def write_run(output: Path, params: Any, config: Config, tokenizer: Tokenizer) -> None:
    """A run directory with one checkpoint, whole or not at all."""
    configs.check(config)
    with new_directory(output) as directory:
        tokenizer.save(directory / "tokenizer")
        train = config.train
        checkpoints = Checkpoints(
            directory,
            keep_latest=1,
            keep_best=0,
            best_metric=train.best_metric,
            fingerprint=tokenizer.fingerprint,
        )
        checkpoints.save(1, {"params": jax.tree.map(jnp.asarray, params)}, None)
        checkpoints.close()
        (directory / "config.json").write_text(configs.to_json(config), encoding="utf-8")


def export_safetensors(trained: Trained, output: Path) -> None:
    """A directory with model.safetensors (our names), config.json and tokenizer/."""
    with new_directory(output) as directory:
        write_safetensors(directory / _FILE, flatten(trained.params))
        trained.tokenizer.save(directory / "tokenizer")
        (directory / "config.json").write_text(configs.to_json(trained.config), encoding="utf-8")


def import_safetensors(source: Path, output: Path) -> None:
    """A run directory from what export_safetensors wrote."""
    text = read_file(source / "config.json").decode(errors="replace")
    config = configs.from_json(text, str(source / "config.json"))
    tokenizer = Tokenizer.load(source / "tokenizer")
    tensors = read_safetensors(source / _FILE)
    have = {name: tensor.shape for name, tensor in tensors.items()}
    require_fit(str(source / _FILE), have, shapes_of(Model(config.model)))
    write_run(output, unflatten(tensors), config, tokenizer)
