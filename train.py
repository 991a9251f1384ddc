"""Train a Transformer: python train.py --config configs/quickstart.py --workdir runs/quickstart

Running the same command again goes on from the last checkpoint. Any field of the configuration can
be set: --train.steps 1000 --data.train-source my.en ... ; --help lists them all.

--require-accelerator refuses to train on a CPU; --distributed joins the processes of a Cloud TPU
pod, of SLURM or of JAX_COORDINATOR_ADDRESS (docs/scale.md).
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from transformer_jax import command_line


def main(arguments: Sequence[str]) -> int:
    """Parse, load the config, train."""
    parser = command_line.Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--workdir", default="")
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--require-accelerator", action="store_true")
    known, rest = parser.parse_known_args(arguments)
    config = command_line.load_config_file(known.config)
    config = command_line.override(
        config, rest, "train.py --config FILE --workdir DIR", __doc__ or ""
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for noisy in ("absl", "orbax", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    workdir = known.workdir or f"runs/{Path(known.config.partition(':')[0]).stem}"

    from transformer_jax.train.loop import train  # imports jax: after the arguments are right

    return train(
        config,
        Path(workdir),
        distributed=known.distributed,
        require_accelerator=known.require_accelerator,
    )


if __name__ == "__main__":
    command_line.use_huge_pages()
    command_line.run(main)
