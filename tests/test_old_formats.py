"""Run directories of every format version so far are read for ever: tests/fixtures/format_N."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax import Translator
from transformer_jax import config as configs
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import MeshConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import TrainState, abstract_state

FIXTURES = Path(__file__).parent / "fixtures"
RUNS = sorted(FIXTURES.glob("format_*"))


def expected(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("run_dir", RUNS, ids=lambda path: path.name)
def test_an_old_run_is_used(run_dir: Path):
    """Bug: a renamed parameter, config field or tokenizer file makes old models useless, or
    changes what they say."""
    translator = Translator.from_checkpoint(run_dir)
    (score,) = translator.score(["a b c"], ["x y"])
    assert score.log_prob == pytest.approx(expected(run_dir)["log_prob"], abs=1e-4)
    assert len(translator.translate(["a b"])) == 1


@pytest.mark.parametrize("run_dir", RUNS, ids=lambda path: path.name)
def test_an_old_run_goes_on(run_dir: Path, tmp_path: Path):
    """Bug: training cannot go on after an update: optimizer's tree, or place in the data."""
    run_dir = Path(shutil.copytree(run_dir, tmp_path / "run"))  # opening for writing may tidy up
    config = configs.load(run_dir / "config.json")
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices())
    averages = config.train.ema_decay > 0
    abstract = abstract_state(Model(config.model), make_optimizer(config), mesh, averages)
    step = int(next((run_dir / "checkpoints").iterdir()).name)
    checkpoints = Checkpoints(
        run_dir,
        keep_latest=5,
        keep_best=1,
        best_metric="loss",
        fingerprint=Tokenizer.load(run_dir / "tokenizer").fingerprint,
    )
    assert checkpoints.latest_step == step
    assert checkpoints.data_position(step) == expected(run_dir)["position"]
    state = TrainState.of_items(np.int32(step), checkpoints.restore(step, abstract.items()))
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    sums = {
        jax.tree_util.keystr(path, simple=True, separator="."): float(np.abs(leaf).sum())
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(state.params))
    }
    assert sums == pytest.approx(expected(run_dir)["sums"], rel=1e-6)
