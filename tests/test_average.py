"""The mean of checkpoints: of the right ones, exact, and beside a run that goes on."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.average import average
from transformer_jax.checkpoint import steps_of
from transformer_jax.config import Config, ConfigError
from transformer_jax.decode.translator import Translator
from transformer_jax.train.loop import train


@pytest.fixture()
def run(tiny_run: Config, tmp_path: Path) -> tuple[Config, Path]:
    """A run of 12 steps that has saved 4, 6, 8 and 12."""
    config = dataclasses.replace(
        tiny_run, train=dataclasses.replace(tiny_run.train, eval_bleu_sentences=0)
    )
    assert train(config, tmp_path / "run") == 0
    return config, tmp_path / "run"


def params(run_dir: Path, which: str | int):
    translator = Translator.from_checkpoint(run_dir, which)
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(translator.params)]


def test_the_mean_of_the_last_ones(run):
    """Bugs: a sum, the first ones, the optimizer's moments, the best one counted twice; a run
    cannot go on beside its average, or deletes it."""
    config, run_dir = run
    steps = steps_of(run_dir)
    assert len(steps) >= 3
    path = average(run_dir, 3)
    wanted = [np.mean(x, 0) for x in zip(*(params(run_dir, s) for s in steps[-3:]), strict=True)]
    for which in ("average", path):
        given = (run_dir, which) if which == "average" else (path, None)
        for got, want in zip(params(*given), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=16))
    assert train(longer, run_dir) == 0
    for got, want in zip(params(run_dir, "average"), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    average(run_dir, 1)  # a new one takes the place of the old
    for got, want in zip(params(run_dir, "average"), params(run_dir, 16), strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ConfigError, match=r"--last: got 99, allowed: 1 to \d"):
        average(run_dir, 99)


def test_what_is_missing_is_said(tiny_run, tmp_path):
    """Bug: pages of Orbax for a directory without a run or without an average."""
    with pytest.raises(ConfigError, match=r"config\.json"):
        average(tmp_path / "none")
    config = dataclasses.replace(tiny_run, train=dataclasses.replace(tiny_run.train, steps=1))
    train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match="got no average, allowed: a run with one"):
        Translator.from_checkpoint(tmp_path / "run", "average")


def test_a_run_may_end_in_its_average(tiny_run, tmp_path, capsys):
    """Bug: the last checkpoint is scored and offered, not the average that was asked for."""
    changes = {"average_last": 5, "steps": 8, "eval_bleu_sentences": 0}
    config = dataclasses.replace(tiny_run, train=dataclasses.replace(tiny_run.train, **changes))
    assert train(config, tmp_path / "run") == 0
    assert "--which average" in capsys.readouterr().out
    steps = [step for step in steps_of(tmp_path / "run") if step]
    assert 1 < len(steps) < 5
    wanted = [
        np.mean(x, 0) for x in zip(*(params(tmp_path / "run", s) for s in steps), strict=True)
    ]
    for got, want in zip(params(tmp_path / "run", "average"), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
