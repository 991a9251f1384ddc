"""Peak memory of a training step against sequence length, by the compiler's own analysis.

    make bench NAME=attention_memory

Nothing is run: each step is compiled for one device and asked for its temporary memory.
"""

import dataclasses

import jax
import numpy as np

from transformer_jax.config import Config, MeshConfig, ModelConfig
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import abstract_state
from transformer_jax.train.step import compile_train_step
from transformer_jax.types import Batch

MODEL = ModelConfig(
    vocab_size=512, d_model=128, d_ff=512, num_heads=4, encoder_layers=1, decoder_layers=1
)
KINDS = {
    "plain": {"attention_implementation": "plain"},
    "blockwise": {"attention_implementation": "blockwise"},
    "blockwise, window 512": {
        "attention_implementation": "blockwise",
        "attention_window": 512,
    },
    "linear self-attention": {"attention": "linear", "attention_implementation": "blockwise"},
}


def temporary_bytes(changes: dict, length: int) -> int:
    """Temporary memory of one step on one row of `length` source and target tokens."""
    config = Config(model=dataclasses.replace(MODEL, **changes))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model, optimizer = Model(config.model), make_optimizer(config)
    abstract = abstract_state(model, optimizer, mesh)
    ids = jax.ShapeDtypeStruct((1, length), np.int32)
    step = compile_train_step(model, optimizer, config, mesh, abstract)
    compiled = step.lower(abstract, Batch(*[ids] * 5)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Print the table of docs/long_sequences.md."""
    lengths = [1024, 2048, 4096, 8192, 16384]
    print("| attention | " + " | ".join(f"{n // 1024}k" for n in lengths) + " |")
    print("|---|" + "---:|" * len(lengths))
    for name, changes in KINDS.items():
        cells = [f"{temporary_bytes(changes, n) / 2**20:,.0f}" for n in lengths]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
