"""What users of training have met elsewhere (F86 to F122), where no other test says it."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train as entry
from transformer_jax.checkpoint import Checkpoints, SaveError, steps_of
from transformer_jax.config import (
    Config,
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from transformer_jax.model import Model
from transformer_jax.runtime import enough_memory
from transformer_jax.sharding import make_mesh, put_batch
from transformer_jax.train import loop
from transformer_jax.train.loop import train
from transformer_jax.train.metrics import NotFinite, Window
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import TrainState, new_state
from transformer_jax.train.step import compile_eval_step, train_step
from transformer_jax.train.stop import patience_is_over
from transformer_jax.types import Batch, Metrics

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("quick_compilation")


def sums(loss: float = 1.0, tokens: float = 2.0, norm: float = 1.0) -> Metrics:
    return Metrics(*(jnp.float32(x) for x in (loss, loss, 1.0, tokens, norm, 1.0)))


def a_batch(rows: int = 4) -> Batch:
    ids = np.random.default_rng(0).integers(4, 40, (5, rows, 8)).astype(np.int32)
    ones = np.ones((rows, 8), np.int32)
    return Batch(ids[0], ones, ids[1], ids[2], ones)


# ---- Not finite ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"loss": float("nan")}, {"norm": float("inf")}])
def test_the_first_step_that_is_not_finite_is_named(bad: dict[str, float]):
    """Bug: F62: an infinite gradient passes as a step of nothing, or the step of the log is named
    instead of the one that broke."""
    window = Window(lambda _: 1.0)
    for values in ({}, {}, bad, bad):
        window.add(sums(**values))
    with pytest.raises(NotFinite, match="step 23: the") as said:
        window.close(24)
    assert said.value.step == 23


def test_steps_before_an_evaluation_stay_in_the_log():
    """Bug: an evaluation between two log lines throws away the steps before it, or its seconds
    count as training."""
    window = Window(lambda _: 1.0)
    window.add(sums(loss=2.0))
    window.check(1)
    window.leave_out(1e6)
    window.add(sums(loss=4.0))
    values = window.close(2)
    assert values["loss"] == 1.5 and values["steps_per_sec"] < 0


# ---- The loop -----------------------------------------------------------------------------------


@pytest.fixture()
def quick_run(tiny_run: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run in this process, without a report at its end and without BLEU."""
    monkeypatch.setattr(loop, "report", lambda *_: None)
    monkeypatch.setattr(loop, "keep_compiled_programs", lambda: None)
    fields = {"eval_bleu_sentences": 0, "eval_every_steps": 2, "checkpoint_every_steps": 0}
    data = replace(tiny_run.data, num_buckets=1)
    data = replace(data, valid_source=data.train_source, valid_target=data.train_target)
    return replace(tiny_run, data=data, train=replace(tiny_run.train, steps=8, **fields))


def lines(run_dir: Path, part: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in found if line["part"] == part]


def test_patience_ends_a_run_and_survives_its_resuming(quick_run: Config, tmp_path: Path):
    """Bug: patience starts anew after each restart, or an ended run goes on for one evaluation."""
    still = replace(quick_run, optimizer=OptimizerConfig(learning_rate=0.0, warmup_steps=1))
    patient = replace(still, train=replace(still.train, patience=2))
    short = replace(patient, train=replace(patient.train, steps=4))
    assert train(short, tmp_path / "parts") == 0
    assert train(patient, tmp_path / "parts") == 0
    assert [line["step"] for line in lines(tmp_path / "parts", "valid")] == [2, 4, 6]
    assert train(patient, tmp_path / "parts") == 0, "again: ended stays ended"
    assert steps_of(tmp_path / "parts")[-1] == 6


@pytest.mark.parametrize(
    ("values", "metric", "patience", "over"),
    [
        ([3.0, 2.0, 2.5, 2.6], "loss", 2, True),
        ([3.0, 2.0, 2.5, 1.9], "loss", 2, False),
        ([3.0, 2.0, 2.5], "loss", 2, False),
        ([1.0, 3.0, 2.0, 3.0], "bleu", 2, True),
        ([1.0, 3.0, 2.0, 4.0], "bleu", 2, False),
        ([2.0] * 9, "loss", 0, False),
    ],
)
def test_patience_by_hand(values: list[float], metric: str, patience: int, over: bool):
    """Bug: off by one evaluation, or the sign of BLEU."""
    assert patience_is_over([{metric: v} for v in values], metric, patience) is over


def test_a_warm_up_longer_than_the_run_is_warned_of(
    quick_run: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Bug: F110: the learning rate never gets where it was meant to, and nobody says so."""
    config = replace(quick_run, train=replace(quick_run.train, steps=1))
    assert train(config, tmp_path / "run") == 0
    (said,) = (r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)
    assert said.startswith("--optimizer.warmup-steps: 20, but the run has only 1 steps")


def test_a_run_saves_before_its_first_step(
    quick_run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: F99: that nothing can be written is found out hours later."""
    monkeypatch.setattr(loop, "compile_train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(quick_run, tmp_path / "run")
    assert steps_of(tmp_path / "run") == [0]


def test_too_little_space_is_said_before_the_first_step(
    quick_run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: F99: as above; the disk fills up at the second checkpoint."""
    usage = types.SimpleNamespace(free=100_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"got 0.00 GB free, .* allowed: room for two"):
        train(quick_run, tmp_path / "run")


def test_an_accelerator_can_be_required(quick_run: Config, tmp_path: Path):
    """Bug: F133: an expensive machine trains on its CPU for a night."""
    with pytest.raises(ConfigError, match="--require-accelerator: got cpu"):
        train(quick_run, tmp_path / "run", require_accelerator=True)
    assert not (tmp_path / "run").exists()


def test_nothing_goes_to_the_devices_unasked(
    quick_run: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: each step waits for a transfer that nobody sees: here, a batch that was left behind."""
    monkeypatch.setattr(loop, "put_batch", lambda mesh, batch, share: batch)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(quick_run, tmp_path / "run")


def test_too_little_memory_says_what_to_lower(quick_run: Config):
    """Bug: the device's own message is lost, or nobody says which field needs less."""
    said = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes.\nBuffer table: ..."
    with pytest.raises(MemoryError) as error, enough_memory(quick_run):
        raise jax.errors.JaxRuntimeError(said)
    for words in (said, "--train.micro-batches (now 1)", "--data.global-batch-tokens (now 512)"):
        assert words in str(error.value)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), enough_memory(quick_run):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.mark.slow
def test_an_average_of_the_parameters_is_evaluated_saved_and_resumed(
    quick_run: Config, tmp_path: Path
):
    """Bug: the average is evaluated and something else handed on; a resumed run averages anew."""
    config = replace(quick_run, train=replace(quick_run.train, ema_decay=0.5))
    assert train(config, tmp_path / "whole") == 0
    half = replace(config, train=replace(config.train, steps=4))
    assert train(half, tmp_path / "parts") == 0
    assert train(config, tmp_path / "parts") == 0
    assert [x["loss"] for x in lines(tmp_path / "whole", "valid")] == [
        x["loss"] for x in lines(tmp_path / "parts", "valid")
    ]


# ---- Checkpoints --------------------------------------------------------------------------------


def open_checkpoints(run_dir: Path, **options: Any) -> Checkpoints:
    options = {"keep_latest": 2, "keep_best": 0} | options
    return Checkpoints(run_dir, best_metric="loss", fingerprint="f" * 64, **options)


def test_every_so_many_steps_stay(tmp_path: Path):
    """Bug: the checkpoints that were to stay for ever go with the others."""
    checkpoints = open_checkpoints(tmp_path, keep_every=10)
    for step in range(0, 41, 5):
        checkpoints.save(step, {"params": {"w": jnp.ones(2)}}, None)
    checkpoints.close()
    assert steps_of(tmp_path) == [0, 10, 20, 30, 35, 40]


def test_a_directory_that_cannot_be_made_is_said_at_once(tmp_path: Path):
    """Bug: F97: minutes or hours of waiting for a save that will never come."""
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, {"params": {"w": jnp.ones(2)}}, None)
    checkpoints.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(SaveError, match=r"step 2 cannot be written: .*Not a directory"):
        checkpoints.save(2, {"params": {"w": jnp.ones(2)}}, None)
        checkpoints.wait()


def test_a_path_that_the_locale_cannot_read_is_one_line(tmp_path: Path):
    """Bug: F34: pages of TensorStore, whose C++ is given half a character."""
    code = """
        import sys
        from pathlib import Path
        from transformer_jax.checkpoint import ConfigError, checkpoint_root
        try:
            checkpoint_root(Path(sys.argv[1]))
        except ConfigError as error:
            print(error)
    """
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "größe")],
        cwd=REPOSITORY,
        env=os.environ | locale,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.startswith("--workdir: got '") and "UTF-8 locale" in result.stdout
    assert result.stdout.count("\n") == 1 and not result.stderr


# ---- Compiled once ------------------------------------------------------------------------------


def test_the_eval_step_is_compiled_once_for_a_shape(tiny_model: Model, tiny_params: Any):
    """Bug: F117: each evaluation compiles again, since its parameters come from another place."""
    mesh = make_mesh(MeshConfig())
    step: Any = compile_eval_step(tiny_model, mesh)
    batch = put_batch(mesh, a_batch(8))
    step(tiny_params, batch)
    step(jax.tree.map(lambda x: x + 1, tiny_params), batch)
    assert step._cache_size() == 1


# ---- Averages and optimizers by hand ------------------------------------------------------------


@pytest.fixture(scope="module")
def shallow(tiny_config: ModelConfig) -> Model:
    """One layer on each side, nothing random."""
    none = {"dropout": 0.0, "embedding_dropout": 0.0}
    return Model(replace(tiny_config, encoder_layers=1, decoder_layers=1, **none))


def test_the_average_by_hand(shallow: Model):
    """Bug: the average starts at the noise of the first parameters, or lags a step behind."""
    config = Config(
        model=shallow.config,
        optimizer=OptimizerConfig(schedule="constant", learning_rate=0.1, warmup_steps=0),
        train=TrainConfig(ema_decay=0.6),
    )
    optimizer = make_optimizer(config)
    step = jax.jit(
        lambda state: train_step(
            state, a_batch(), model=shallow, optimizer=optimizer, config=config
        )[0]
    )
    state: TrainState = jax.jit(lambda: new_state(shallow, optimizer, 0, True))()
    expected = 0.0
    for number in range(4):
        state = step(state)
        decay = min(0.6, number / (number + 1))
        expected = decay * expected + (1 - decay) * np.asarray(
            state.params["embedding"], np.float64
        )
        np.testing.assert_allclose(state.average["embedding"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "adafactor", "lion", "muon"])
def test_every_optimizer_lowers_the_loss(name: str, shallow: Model):
    """Bug: an optimizer that is named and not made, climbs, or does not move."""
    rate = 1e-3 if name == "lion" else 1e-2
    config = Config(
        model=shallow.config,
        optimizer=OptimizerConfig(name, schedule="constant", learning_rate=rate, warmup_steps=0),
    )
    optimizer = make_optimizer(config)
    step = jax.jit(
        lambda state: train_step(
            state, a_batch(), model=shallow, optimizer=optimizer, config=config
        )
    )
    state, losses = jax.jit(lambda: new_state(shallow, optimizer, 0))(), []
    for _ in range(12):
        state, metrics = step(state)
        losses.append(float(metrics.nll / metrics.tokens))
    assert losses[-1] < losses[0] - 0.5 and np.isfinite(losses).all()


# ---- The command line ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config(:\n    pass\n", ":1: "),
        ("x = 1\n\nimport no_such_thing\n", "No module named 'no_such_thing'"),
    ],
)
def test_a_config_file_that_is_no_python_is_one_line(tmp_path: Path, text: str, words: str):
    """Bug: a page of traceback for a missing bracket."""
    path = tmp_path / "broken.py"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as said:
        entry.main(["--config", str(path)])
    assert str(path) in str(said.value) and words in str(said.value)
    assert "\n" not in str(said.value)
