"""The mean of the parameters of several checkpoints (section 6.1): better than any one of them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import config as configs
from transformer_jax.checkpoint import find_step, load_params, save_average, steps_of
from transformer_jax.config import ConfigError, MeshConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh, replicated


def average(run_dir: str | Path, last: int = 5) -> Path:
    """Write the mean of the last checkpoints of a run, which "average" then names.

    Args:
        run_dir: the run directory.
        last: how many; the paper takes 5 for base and 20 for big models.

    Returns:
        Where it was written.

    Raises:
        ConfigError: the run has fewer checkpoints.
    """
    run_dir = Path(run_dir).expanduser().absolute()
    config = configs.load(run_dir / "config.json")
    tokenizer = Tokenizer.load(run_dir / "tokenizer")
    find_step(run_dir, "latest", config.train.best_metric)  # says what is missing
    steps = [step for step in steps_of(run_dir) if step > 0]  # 0: before any training
    if not 1 <= last <= len(steps):
        raise ConfigError(f"--last: got {last}, allowed: 1 to {len(steps)}, those that are kept")
    # One device, for a mesh would only spread what is summed once.
    sharding = replicated(make_mesh(MeshConfig(), jax.local_devices()[:1]))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        Model(config.model).abstract_params(),
    )
    total: Any = None
    for step in steps[-last:]:
        params = jax.tree.map(
            np.asarray, load_params(run_dir, step, abstract, tokenizer.fingerprint)
        )
        total = params if total is None else jax.tree.map(np.add, total, params)
    mean = jax.tree.map(lambda x: jax.device_put(x / np.float32(last), sharding), total)
    return save_average(run_dir, mean, steps[-last:], tokenizer.fingerprint)
