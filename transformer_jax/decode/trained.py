"""A trained run, read from its directory: parameters, config and tokenizer that belong together."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from transformer_jax import config as configs
from transformer_jax.checkpoint import find_step, load_params
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import Model
from transformer_jax.runtime import keep_compiled_programs
from transformer_jax.sharding import make_mesh, param_shardings


class Trained(NamedTuple):
    """What a run directory holds, without the optimizer."""

    params: Any
    config: configs.Config
    tokenizer: Tokenizer
    mesh: Mesh


def load_trained(
    path: str | Path,
    which: str | int | None = None,
    mesh: configs.MeshConfig | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Trained:
    """Load a run directory, or one step of it (a directory checkpoints/STEP).

    Args:
        path: the directory.
        which: "best", "latest", "average" or a step; None: best, else latest.
        mesh: how the model is spread over devices; None: a copy on each of them.
        dtype: of activations; None: that of the run.

    Raises:
        ConfigError: no such run, or its parts do not belong together.
    """
    run_dir = Path(path).expanduser().absolute()
    if run_dir.parent.name == "checkpoints":
        run_dir, which = run_dir.parent.parent, run_dir.name
    keep_compiled_programs()
    config = configs.load(run_dir / "config.json")
    tokenizer = Tokenizer.load(run_dir / "tokenizer")
    step = find_step(run_dir, which or "best", config.train.best_metric)
    devices = make_mesh(mesh or configs.MeshConfig())
    if dtype:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    model = Model(config.model)
    shapes = model.abstract_params()
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        param_shardings(devices, model.logical_axes(), shapes),
    )
    params = load_params(run_dir, step, abstract, tokenizer.fingerprint)
    return Trained(params, config, tokenizer, devices)
