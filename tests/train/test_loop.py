"""Whole runs, as people start them: to the end, killed, stopped, resumed, refused."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train as entry
from transformer_jax import config as configs
from transformer_jax.checkpoint import find_step, load_items, steps_of
from transformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import abstract_state

REPOSITORY = Path(__file__).resolve().parents[2]
COMPILED = tempfile.TemporaryDirectory()
STEPS = 24

# A config file that can also do harm: at a moment of the run it sends the run a signal, or breaks
# its parameters. SABOTAGE is "MOMENT WHAT ...", such as "train:11 SIGTERM".
CONFIG_FILE = """
import functools
import os
import signal

from transformer_jax import config as configs


def get_config():
    if "SABOTAGE" in os.environ:
        sabotage(*os.environ["SABOTAGE"].split())
    return configs.from_json({json!r})


def sabotage(wanted, *harm):
    import jax

    from transformer_jax.checkpoint import Checkpoints
    from transformer_jax.data.tokenizer import Tokenizer
    from transformer_jax.train import loop
    from transformer_jax.train.metrics import MetricsLog

    def after(owner, name, moment):
        function = getattr(owner, name)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            if moment(*args) == wanted:
                for what in harm:
                    os.kill(os.getpid(), getattr(signal, what))
            return result

        setattr(owner, name, wrapper)

    after(Tokenizer, "save", lambda *_: "tokenizer")
    after(MetricsLog, "write", lambda _, step, part, *__: f"{{part}}:{{step}}")
    after(Checkpoints, "save", lambda _, step, *__: f"save:{{step}}")
    after(Checkpoints, "close", lambda *_: "report")

    if harm == ("nan",):
        compile_train_step = loop.compile_train_step

        def broken(*args):
            step_fn = compile_train_step(*args)

            @jax.transfer_guard("allow")
            def step(state, batch):
                if int(state.step) + 1 == int(wanted):
                    params = jax.tree.map(lambda x: x * float("nan"), state.params)
                    state = state._replace(params=params)
                return step_fn(state, batch)

            return step

        loop.compile_train_step = broken
"""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Number words in English and German, and a config file that trains on them in seconds."""
    root = tmp_path_factory.mktemp("loop")
    vocabularies = {
        "en": "zero one two three four five six seven eight nine".split(),
        "de": "null eins zwei drei vier fünf sechs sieben acht neun".split(),
    }
    numbers = [[(7 * i + 3 * j * j) % 10 for j in range(1 + i % 4)] for i in range(120)]
    for name, words in vocabularies.items():
        lines = [" ".join(words[n] for n in row) + "\n" for row in numbers]
        (root / f"train.{name}").write_text("".join(lines), encoding="utf-8")
        (root / f"valid.{name}").write_text("".join(lines[1:40:8]), encoding="utf-8")
    config = Config(
        model=ModelConfig(d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1),
        tokenizer=TokenizerConfig(vocab_size=300, kind="bpe"),
        data=DataConfig(
            train_source=(str(root / "train.en"),),
            train_target=(str(root / "train.de"),),
            valid_source=(str(root / "valid.en"),),
            valid_target=(str(root / "valid.de"),),
            max_source_tokens=30,
            max_target_tokens=30,
            global_batch_tokens=300,
            num_buckets=1,
        ),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=20),
        train=TrainConfig(
            steps=STEPS,
            eval_every_steps=12,
            eval_bleu_sentences=9,
            checkpoint_every_steps=4,
            log_every_steps=1,
        ),
        decode=DecodeConfig(beam_size=1, max_extra_tokens=2),
    )
    text = CONFIG_FILE.format(json=configs.to_json(config))
    (root / "tiny.py").write_text(text, encoding="utf-8")
    return root


def command(workshop: Path, run_dir: Path | str, *arguments: str) -> list[str]:
    start = [sys.executable, "train.py", "--config", str(workshop / "tiny.py")]
    return [*start, "--workdir", str(run_dir), *arguments]


def environment(**more: str) -> dict[str, str]:
    """One CPU device, and a cache of what earlier runs compiled."""
    given = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": COMPILED.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return os.environ | given | more


def train(
    workshop: Path, run_dir: Path | str, *arguments: str, sabotage: str = ""
) -> subprocess.CompletedProcess[str]:
    """Start a run and wait for it; in a locale without UTF-8, unless its name needs one."""
    more = {"LC_ALL": "C", "PYTHONUTF8": "0"} if str(run_dir).isascii() else {}
    if sabotage:
        more["SABOTAGE"] = sabotage
    return subprocess.run(
        command(workshop, run_dir, *arguments),
        cwd=REPOSITORY,
        env=environment(**more),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def refusal(workshop: Path, run_dir: Path, *arguments: str) -> str:
    """The line with which a start is refused; in this process, which is quicker."""
    with pytest.raises(ConfigError) as error:
        entry.main(command(workshop, run_dir, *arguments)[2:])
    assert "\n" not in str(error.value)
    return str(error.value)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if "per_sec" not in k} for line in lines]


def read_state(run_dir: Path, step: int) -> list[np.ndarray]:
    """Parameters and optimizer statistics of a step."""
    config = configs.load(run_dir / "config.json")
    tree = abstract_state(
        Model(config.model), make_optimizer(config), make_mesh(MeshConfig(), jax.devices()[:1])
    )
    fingerprint = Tokenizer.load(run_dir / "tokenizer").fingerprint
    wanted = {"params": tree.params, "opt_state": tree.opt_state}
    found = load_items(run_dir / "checkpoints" / str(step), wanted, fingerprint)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def same_run(run_dir: Path, expected: Path) -> None:
    """Two runs ended with the same bits and told the same."""
    for got, want in zip(read_state(run_dir, STEPS), read_state(expected, STEPS), strict=True):
        np.testing.assert_array_equal(got, want)
    assert read_metrics(run_dir) == read_metrics(expected)
    both = (run_dir, expected)
    best = [find_step(path, "best", "loss") for path in both]
    assert best[0] == best[1]
    assert not list(run_dir.rglob("*tmp*")) and not list(run_dir.rglob("*.partial"))
    one, two = (json.loads((path / "results.json").read_text("utf-8"))["valid"] for path in both)
    assert (one["bleu"], one["chrf"]) == (two["bleu"], two["chrf"])


@pytest.fixture(scope="module")
def finished(workshop: Path) -> Path:
    """A run that nobody disturbed; its directory is named as people name them."""
    run_dir = workshop / "run ä 1"
    result = train(workshop, f"{run_dir}/")
    assert result.returncode == 0, result.stderr
    (workshop / "stdout").write_text(result.stdout, encoding="utf-8")
    (workshop / "stderr").write_text(result.stderr, encoding="utf-8")
    return run_dir


# ---- To the end ---------------------------------------------------------------------------------


def test_a_run_leaves_everything_behind(finished: Path):
    """Bug: something that the next program needs is not written."""
    config = configs.load(finished / "config.json")
    tokenizer = Tokenizer.load(finished / "tokenizer")
    assert config.model.vocab_size == tokenizer.vocab_size == 300
    assert steps_of(finished)[-1] == STEPS and len(steps_of(finished)) == 5
    assert [p for p in (finished / "tensorboard").iterdir() if p.stat().st_size > 1000]
    names = {path.name for path in finished.iterdir()}
    expected = {"config.json", "tokenizer", "checkpoints", "metrics.jsonl"}
    assert names >= expected | {"tensorboard", "results.json"}
    assert not list(finished.rglob("*.pkl")) and not list(finished.rglob("*.pickle"))


def test_metrics_tell_every_step_and_evaluation(finished: Path):
    """Bug: lines are lost or doubled; BLEU is of teacher-forced pieces (F123); the logged learning
    rate is not the one that was used (F109)."""
    lines = read_metrics(finished)
    steps = {part: [x["step"] for x in lines if x["part"] == part] for part in ("train", "valid")}
    assert steps == {"train": list(range(1, STEPS + 1)), "valid": [12, 24]}
    rates = [x["learning_rate"] for x in lines if x["part"] == "train"]
    noam = [16**-0.5 * min(s**-0.5, s * 20**-1.5) for s in range(1, STEPS + 1)]
    np.testing.assert_allclose(rates, noam, rtol=1e-6)
    losses = [x["loss"] for x in lines if x["part"] == "train"]
    assert losses[-1] < losses[0] - 1 and np.isfinite(losses).all()
    for valid in (x for x in lines if x["part"] == "valid"):
        assert {"loss", "perplexity", "teacher_forced_accuracy", "bleu", "chrf"} <= set(valid)
        assert 0 <= valid["bleu"] <= 100


def test_a_run_says_where_it_runs_and_what_it_left_out(workshop: Path, finished: Path):
    """Bug: F35, F133: the lines of the log are swallowed by another library's handler; F87."""
    said = (workshop / "stderr").read_text(encoding="utf-8")
    assert said.startswith("cpu: 1 x ")
    for words in ("kept 120 of 120 training pairs (0 empty, 0 too long)", " parameters\n"):
        assert words in said
    for line in ("step 1/24  loss ", "step 24/24  loss ", "step 12 validation: loss "):
        assert f"\n{line}" in said
    assert "Traceback" not in said and "sharding info" not in said and "Warning" not in said


def test_stdout_tells_the_score_and_the_next_command(workshop: Path, finished: Path):
    """Bug: a score without signature (F130); a command that a shell cuts at a space."""
    said = (workshop / "stdout").read_text(encoding="utf-8")
    assert "valid: sacreBLEU " in said and "|tok:13a|" in said and "of 5 sentences" in said
    assert "fünf" in said or "null" in said
    assert "-m transformer_jax translate --checkpoint '" in said and "run ä 1'" in said


def test_the_tokenizer_knows_both_sides(finished: Path):
    """Bug: it is trained on the target alone, and the source is spelt out in bytes."""
    tokenizer = Tokenizer.load(finished / "tokenizer")
    for text in ("two three six eight", "zwei drei fünf acht"):
        (ids,) = tokenizer.encode_source([text])
        assert not [piece for piece in tokenizer.pieces(ids) if piece.startswith("<0x")]


def test_the_evaluate_command_gives_the_score_of_the_run(workshop: Path, finished: Path):
    """Bug: F125: validation BLEU and the command's BLEU of the same model and text differ."""
    files = ["--source", f"{workshop}/valid.en", "--reference", f"{workshop}/valid.de"]
    evaluate = ["-m", "transformer_jax", "evaluate", "--checkpoint", str(finished), *files]
    result = subprocess.run(
        [sys.executable, *evaluate],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        check=True,
    )
    (line,) = result.stdout.decode("utf-8").splitlines()
    scores = json.loads(line)
    assert scores["tokens_per_sec"] > 0
    reported = json.loads((finished / "results.json").read_text("utf-8"))["valid"]
    best = find_step(finished, "best", "loss")
    (logged,) = (x for x in read_metrics(finished) if (x["step"], x["part"]) == (best, "valid"))
    for other in (reported, logged):
        assert (scores["bleu"], scores["chrf"]) == (other["bleu"], other["chrf"])
    assert scores["signature"] == reported["signature"] and scores["sentences"] == 5


# ---- Interrupted --------------------------------------------------------------------------------

CODES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "nan": 1}


def interrupted(workshop: Path, run_dir: Path, moments: list[str]) -> None:
    """Start the same command again and again, with harm each time, and at last without."""
    for moment in moments:
        result = train(workshop, run_dir, sabotage=moment)
        assert result.returncode == CODES[moment.split()[1]], (moment, result.stderr)
        assert "Traceback" not in result.stderr, (moment, result.stderr)
    reached = steps_of(run_dir)[-1]
    result = train(workshop, run_dir)
    assert result.returncode == 0, result.stderr
    assert f"resumed from step {reached}\n" in result.stderr


def test_a_killed_and_stopped_run_ends_with_the_same_bits(
    workshop: Path, finished: Path, tmp_path: Path
):
    """Bug: F105, F107, F122: after a kill or Ctrl-C, data, dropout, optimizer, learning rate or
    metrics are not those of a run that nobody disturbed; or there is nothing to go on from."""
    moments = [
        "save:4 SIGKILL",  # while the checkpoint is written
        "train:11 SIGTERM",  # stops after step 12, whose evaluation is made on the next start
        "train:16 SIGINT",  # stops after step 17, where no checkpoint is due
    ]
    interrupted(workshop, tmp_path / "run", moments)
    same_run(tmp_path / "run", finished)


@pytest.mark.slow
def test_a_run_survives_every_other_moment(workshop: Path, finished: Path, tmp_path: Path):
    """Bug: as above, at moments that come more rarely."""
    moments = [
        "tokenizer SIGKILL",  # before config.json is there
        "train:3 SIGKILL",  # before the first checkpoint
        "train:5 SIGINT SIGINT",  # leaves at once
        "save:8 SIGKILL",
        "valid:12 SIGKILL",  # between the evaluation and its checkpoint
        "14 nan",
        "save:16 SIGKILL",
        "train:23 SIGTERM",  # stops after the last step, before its evaluation
        "report SIGTERM",  # when everything is trained
    ]
    interrupted(workshop, tmp_path / "run", moments)
    same_run(tmp_path / "run", finished)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_run_survives_random_kills(workshop: Path, finished: Path, tmp_path: Path, kills: int):
    """Bug: a moment that nobody has thought of: in the start, a step, an evaluation or a save."""
    draw = random.Random(kills)
    for _ in range(kills):
        process = subprocess.Popen(
            command(workshop, tmp_path / "run"),
            cwd=REPOSITORY,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(draw.uniform(1.0, 6.0))
        process.kill()
        process.wait()
    assert train(workshop, tmp_path / "run").returncode == 0
    same_run(tmp_path / "run", finished)


def test_a_signal_before_training_leaves_at_once(workshop: Path, tmp_path: Path):
    """Bug: F122: a traceback for Ctrl-C during the start, or a run that cannot be started anew."""
    result = train(workshop, tmp_path / "run", sabotage="tokenizer SIGINT")
    assert (result.returncode, result.stdout) == (130, "")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_loss_that_is_not_finite_stops_the_run(workshop: Path, finished: Path, tmp_path: Path):
    """Bug: NaN is trained on, saved over the good checkpoints, or ends in a traceback."""
    result = train(workshop, tmp_path / "run", sabotage="6 nan")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (said,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert "step 6: the loss is not finite" in said and "last good checkpoint is step 4" in said
    (kept,) = (tmp_path / "run").glob("not-finite-6.jsonl")
    pairs = [json.loads(line) for line in kept.read_text("utf-8").splitlines()]
    lines = {
        lang: set((workshop / f"train.{lang}").read_text("utf-8").split("\n"))
        for lang in ("en", "de")
    }
    assert len(pairs) > 5 and {x["source"] for x in pairs} <= lines["en"]
    assert {x["target"] for x in pairs} <= lines["de"]
    assert steps_of(tmp_path / "run") == [0, 4]
    for got in read_state(tmp_path / "run", 4):
        assert np.isfinite(got).all()
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_never_saved(workshop: Path, tmp_path: Path):
    """Bug: as above, when no log line is due between the break and the checkpoint."""
    result = train(workshop, tmp_path / "run", "--train.log-every-steps", "50", sabotage="6 nan")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "step 6: the loss is not finite" in result.stderr.splitlines()[-1]
    assert steps_of(tmp_path / "run") == [0, 4]


# ---- Resumed with another config ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model.d-ff 64", ["--model.d-ff: got 64", "started with 32", "--workdir"]),
        ("--tokenizer.vocab-size 290", ["--tokenizer.vocab-size: got 290", "started with 300"]),
        ("--train.label-smoothing 0.0", ["--train.label-smoothing: got 0.0"]),
    ],
)
def test_another_config_is_refused(
    workshop: Path, finished: Path, arguments: str, words: list[str]
):
    """Bug: F98: a run goes on under another config, and nobody can say what was trained."""
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    said = refusal(workshop, finished, *arguments.split())
    for word in words:
        assert word in said
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert after == before, "a refused start changes nothing"


def test_more_steps_are_accepted(workshop: Path, finished: Path, tmp_path: Path):
    """Bug: a finished run cannot be made longer, or starts anew."""
    shutil.copytree(finished, tmp_path / "run")
    result = train(
        workshop, tmp_path / "run", "--train.steps", "26", "--decode.batch-tokens", "2000"
    )
    assert result.returncode == 0, result.stderr
    assert "resumed from step 24" in result.stderr
    assert steps_of(tmp_path / "run")[-1] == 26
    lines = read_metrics(tmp_path / "run")
    assert lines[:-3] == read_metrics(finished)
    assert [(x["step"], x["part"]) for x in lines[-3:]] == [
        (25, "train"),
        (26, "train"),
        (26, "valid"),
    ]
    assert configs.load(tmp_path / "run" / "config.json").train.steps == 26


@pytest.mark.slow
def test_fewer_steps_than_made_train_nothing(workshop: Path, finished: Path, tmp_path: Path):
    """Bug: a negative range of batches crashes, or the later checkpoints are lost."""
    shutil.copytree(finished, tmp_path / "run")
    result = train(workshop, tmp_path / "run", "--train.steps", "5")
    assert result.returncode == 0, result.stderr
    assert steps_of(tmp_path / "run") == steps_of(finished)
    assert read_metrics(tmp_path / "run") == read_metrics(finished)


def test_a_failed_start_does_not_bind_the_next_one(workshop: Path, tmp_path: Path):
    """Bug: config.json of a start that failed forbids the corrected command."""
    said = refusal(workshop, tmp_path / "run", "--data.max-source-tokens", "1")
    assert "kept 0 of 120 training pairs" in said
    assert not (tmp_path / "run" / "config.json").exists()


def test_checkpoints_without_a_config_are_refused(workshop: Path, finished: Path, tmp_path: Path):
    """Bug: F98: a fresh run mixes its checkpoints with those of another."""
    shutil.copytree(finished / "checkpoints", tmp_path / "checkpoints")
    said = refusal(workshop, tmp_path)
    assert "holds checkpoints but no config.json" in said
