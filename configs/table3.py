"""Every row of the paper's Table 3: variations of the base model, named by row.

    python train.py --config configs/table3.py:A-h16 --workdir runs/table3-A-h16

The paper trained each for 100,000 steps and scored newstest2013 by beam search, without averaging
checkpoints. Perplexity (per piece) and BLEU as the paper gives them stand beside each row. What is
not named is as in the base model.
"""

import dataclasses
from pathlib import Path

from transformer_jax.command_line import load_config_file
from transformer_jax.config import Config, ConfigError

ROWS: dict[str, dict[str, float | str]] = {
    "base": {},  # perplexity 4.92, BLEU 25.8
    "A-h1": {"num_heads": 1, "d_k": 512, "d_v": 512},  # 5.29, 24.9
    "A-h4": {"num_heads": 4, "d_k": 128, "d_v": 128},  # 5.00, 25.5
    "A-h16": {"num_heads": 16, "d_k": 32, "d_v": 32},  # 4.91, 25.8
    "A-h32": {"num_heads": 32, "d_k": 16, "d_v": 16},  # 5.01, 25.4
    "B-dk16": {"d_k": 16},  # 5.16, 25.1
    "B-dk32": {"d_k": 32},  # 5.01, 25.4
    "C-N2": {"encoder_layers": 2, "decoder_layers": 2},  # 6.11, 23.7
    "C-N4": {"encoder_layers": 4, "decoder_layers": 4},  # 5.19, 25.3
    "C-N8": {"encoder_layers": 8, "decoder_layers": 8},  # 4.88, 25.5
    "C-d256": {"d_model": 256, "d_k": 32, "d_v": 32},  # 5.75, 24.5
    "C-d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},  # 4.66, 26.0
    "C-ff1024": {"d_ff": 1024},  # 5.12, 25.4
    "C-ff4096": {"d_ff": 4096},  # 4.75, 26.2
    "D-dropout0.0": {"dropout": 0.0, "embedding_dropout": 0.0},  # 5.77, 24.6
    "D-dropout0.2": {"dropout": 0.2, "embedding_dropout": 0.2},  # 4.95, 25.5
    "D-smoothing0.0": {"label_smoothing": 0.0},  # 4.67, 25.3
    "D-smoothing0.2": {"label_smoothing": 0.2},  # 5.47, 25.7
    "E-learned": {"positions": "learned"},  # 4.92, 25.7
    "big": {  # 4.33, 26.4 after 300,000 steps
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "dropout": 0.3,
        "embedding_dropout": 0.3,
    },
}


def get_config(row: str = "base") -> Config:
    """The base run with one row's changes."""
    if row not in ROWS:
        raise ConfigError(f"--config table3.py:{row}: got {row!r}, allowed: {', '.join(ROWS)}")
    base = load_config_file(str(Path(__file__).with_name("base.py")))
    changes = dict(ROWS[row])
    steps = 300_000 if row == "big" else base.train.steps
    smoothing = float(changes.pop("label_smoothing", base.train.label_smoothing))
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, **changes),
        train=dataclasses.replace(base.train, steps=steps, label_smoothing=smoothing),
        data=dataclasses.replace(
            base.data, tfds_valid_split="validation", tfds_test_split="validation"
        ),
    )
