"""A model from elsewhere is trained on, goes on after a stop, and leaves again."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax import config as configs
from transformer_jax.config import Config, DataConfig, ModelConfig, TrainConfig
from transformer_jax.decode.trained import load_trained
from transformer_jax.interop.marian import export_marian, import_marian
from transformer_jax.train.run_directory import open_run_directory

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = """
    --model.dropout 0 --data.cldr-train-pairs 3000 --data.max-source-tokens 96
    --data.max-target-tokens 96 --data.global-batch-tokens 1200 --data.num-buckets 2
    --optimizer.schedule constant --optimizer.learning-rate 2e-3 --optimizer.warmup-steps 10
    --train.label-smoothing 0 --train.eval-every-steps 0 --train.eval-bleu-sentences 0
    --train.log-every-steps 20
"""


@pytest.mark.slow
def test_an_imported_model_is_trained_on(marian_directory: Path, tmp_path: Path):
    """Bug: START and EOS of a native run in the batches, a run that is refused when it goes on,
    or can no longer be exported."""
    import_marian(marian_directory, tmp_path / "run")
    command = [sys.executable, "train.py", "--config", "configs/quickstart.py", *FLAGS.split()]
    command += ["--workdir", str(tmp_path / "tuned"), "--train.init-from", str(tmp_path / "run")]
    for steps in (100, 200):
        subprocess.run([*command, "--train.steps", str(steps)], cwd=REPOSITORY, check=True)
    lines = (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()
    found = {x["step"]: x["loss"] for x in map(json.loads, lines) if x["part"] == "train"}
    assert max(found) == 200 and found[200] < found[100] < found[20]
    assert found[200] < 0.8 * found[20]
    export_marian(load_trained(tmp_path / "tuned"), tmp_path / "out")
    import_marian(tmp_path / "out", tmp_path / "back")
    tuned, back = (load_trained(tmp_path / name).params for name in ("tuned", "back"))
    jax.tree.map(np.testing.assert_array_equal, tuned, back)
    imported = load_trained(tmp_path / "run").params
    assert np.abs(np.asarray(tuned["embedding"]) - np.asarray(imported["embedding"])).max() > 1e-3


def test_the_model_is_that_of_the_weights(run: Path, tmp_path: Path):
    """Bug: the config file's model, whose shapes do not fit or, worse, fit; a run that does not
    go on with the command that it was started with."""
    other = load_trained(run).config.model
    asked = Config(
        model=ModelConfig(d_model=192, norm_position="pre", dropout=0.25),
        data=DataConfig(max_source_tokens=48, max_target_tokens=48),
        train=TrainConfig(init_from=str(run)),
    )
    opened = open_run_directory(asked, tmp_path / "new", [])
    assert opened.config.model == dataclasses.replace(other, dropout=0.25)
    (tmp_path / "new" / "config.json").write_text(configs.to_json(opened.config))
    assert open_run_directory(asked, tmp_path / "new", []).config == opened.config
