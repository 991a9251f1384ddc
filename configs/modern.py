"""Today's recipe at the size of the base model, on the data of base.py.

    python train.py --config configs/modern.py --workdir runs/modern

Each change was tried on Multi30k: docs/recipes.md has the table. On WMT it has not been run here.
"""

import dataclasses
from pathlib import Path

from transformer_jax.command_line import load_config_file
from transformer_jax.config import Config, OptimizerConfig


def get_config() -> Config:
    """The base run with a pre-norm RMSNorm, SwiGLU and rotary model, and a cosine to 0."""
    base = load_config_file(str(Path(__file__).with_name("base.py")))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model,
            norm_position="pre",
            norm="rmsnorm",
            ff_bias=False,
            activation="swiglu",
            d_ff=1408,  # two thirds of 2048 in multiples of 128: as many parameters
            positions="rotary",
        ),
        data=dataclasses.replace(base.data, batching="packed"),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=1e-3, warmup_steps=4000, clip_norm=1.0
        ),
    )
