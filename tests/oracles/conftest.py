"""A small model that has learned something, for exports to be compared on."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = """
    --model.d-model 64 --model.d-ff 128 --model.encoder-layers 2 --model.decoder-layers 2
    --model.norm-position post --tokenizer.vocab-size 900 --data.cldr-train-pairs 6000
    --data.max-source-tokens 40 --data.max-target-tokens 40 --data.global-batch-tokens 1600
    --data.num-buckets 2 --optimizer.schedule noam --optimizer.learning-rate 1.0
    --train.steps 300 --train.eval-every-steps 0 --train.eval-bleu-sentences 0
    --train.label-smoothing 0 --decode.length-penalty 1.0 --decode.length-penalty-form power
    --decode.rule transformers
"""


@pytest.fixture(autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """After each test: one here compiles as much as a file elsewhere."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's kind of model, tiny, after a minute on real text: its outputs end."""
    run = tmp_path_factory.mktemp("trained") / "run"
    command = [sys.executable, "train.py", "--config", "configs/quickstart.py"]
    # A process of its own: with one device it is several times as fast as with eight simulated.
    subprocess.run([*command, "--workdir", str(run), *FLAGS.split()], cwd=REPOSITORY, check=True)
    return run
