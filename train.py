"""Train a Transformer: python train.py --config configs/quickstart.py --workdir runs/quickstart

Running the same command again goes on from the last checkpoint. Any field of the configuration can
be set: --train.steps 1000 --data.train-source my.en ... ; --help lists them all.
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

    return train(config, Path(workdir))


if __name__ == "__main__":
    command_line.run(main)
