"""The training run: read, train, evaluate, save, stop, go on."""

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax import config as configs
from transformer_jax.checkpoint import Checkpoints, find_step, load_params, steps_of
from transformer_jax.config import Config, ConfigError
from transformer_jax.data.batching import Encoded
from transformer_jax.data.pipeline import TrainData, encode_pairs, train_batches, train_data
from transformer_jax.data.sources import Splits, load_splits
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.translator import Translator
from transformer_jax.evaluate import bleu_of, token_loss, translation_quality
from transformer_jax.model import Model
from transformer_jax.runtime import describe, keep_compiled_programs
from transformer_jax.sharding import batch_shards, make_mesh, put_batch
from transformer_jax.train.metrics import MetricsLog, Progress
from transformer_jax.train.optimizer import learning_rate, make_optimizer
from transformer_jax.train.state import TrainState, abstract_state, new_state
from transformer_jax.train.step import compile_eval_step, compile_train_step
from transformer_jax.types import Metrics, Pair

logger = logging.getLogger(__name__)


def train(config: Config, workdir: Path) -> int:
    """Train a run to its last step, or until a signal; go on where the run directory stands.

    Returns:
        Exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM, with the state saved.

    Raises:
        ConfigError: the configuration, the data or the run directory cannot be used.
    """
    with _StopSignal() as stop:
        run = _Run(config, workdir.expanduser().absolute())
        with stop.after_the_step():
            run.to_the_end(stop)
        if stop.number is None:
            run.final_report()
    return 0 if stop.number is None else 128 + stop.number


class _Run:
    """Everything a run holds while it trains."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        keep_compiled_programs()
        self.run_dir = run_dir
        self.mesh: Mesh = make_mesh(config.mesh)
        bleu_of(config.data.target_lang)  # what is missing is said now, not at the first score
        self.splits: Splits = load_splits(config.data)
        logger.info(
            describe(self.mesh)
        )  # after what most often fails, so that a mistake is one line
        self.config, self.tokenizer = _open_run_directory(config, run_dir, self.splits)
        config = self.config
        self.model = Model(config.model)
        self.optimizer: optax.GradientTransformation = make_optimizer(config)
        self.abstract: TrainState = abstract_state(self.model, self.optimizer, self.mesh)
        self.data: TrainData = train_data(
            self.splits.train, self.tokenizer, config, batch_shards(self.mesh)
        )
        logger.info("data: %s", self.data.report)
        sizes = [leaf.size for leaf in jax.tree.leaves(self.abstract.params)]
        logger.info("model: %s parameters", f"{sum(sizes):,}")
        self.valid: list[Pair] = [pair for part in self.splits.valid.values() for pair in part]
        self.valid_encoded: Encoded = encode_pairs(self.valid, self.tokenizer)
        self.checkpoints = Checkpoints(
            run_dir,
            keep_latest=config.train.keep_checkpoints,
            keep_best=config.train.keep_best,
            best_metric=config.train.best_metric,
            fingerprint=self.tokenizer.fingerprint,
        )
        self.eval_step = compile_eval_step(self.model, self.mesh)
        # Last: a start that failed above leaves nothing that would forbid a corrected one.
        _write(run_dir / "config.json", configs.to_json(config))

    def to_the_end(self, stop: "_StopSignal") -> None:
        """Train until the last step or a signal; the state is saved either way."""
        config = self.config
        try:
            state, first = self._start_state()
            step_fn = compile_train_step(
                self.model, self.optimizer, config, self.mesh, self.abstract
            )
            log = MetricsLog(self.run_dir, first)
            last = config.train.steps
            with Progress(first, last) as progress:
                if self._evaluation_due(first) and not log.holds(first, "valid"):
                    # The run was stopped right after this step.
                    self._save(first, state, self._evaluate(first, state.params, log, progress))
                window = _Window(learning_rate(config))
                for step, batch in self._batches(first):
                    state, metrics = step_fn(state, batch)
                    window.add(metrics)
                    done = step + 1
                    stopping = stop.number is not None
                    if done % config.train.log_every_steps == 0 or done == last or stopping:
                        values = window.close(done)
                        log.write(done, "train", values)
                        progress.update(done, values)
                    evaluated = None
                    if self._evaluation_due(done) and not stopping:
                        window.close(done)
                        evaluated = self._evaluate(done, state.params, log, progress)
                        window = _Window(learning_rate(config))
                    if (
                        evaluated
                        or stopping
                        or _due(done, config.train.checkpoint_every_steps, last)
                    ):
                        self._save(done, state, evaluated)
                    if stopping:
                        logger.info("stopped by a signal after step %d, saved", done)
                        return
        finally:
            self.checkpoints.close()

    def _start_state(self) -> tuple[TrainState, int]:
        """The saved state, or a fresh one, and the number of steps it has made."""
        step = self.checkpoints.latest_step
        if step is not None:
            items = {"params": self.abstract.params, "opt_state": self.abstract.opt_state}
            items = self.checkpoints.restore(step, items)
            counter = jax.device_put(np.int32(step), self.abstract.step.sharding)
            logger.info("resumed from step %d", step)
            return TrainState(counter, items["params"], items["opt_state"]), step
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        make = jax.jit(
            lambda seed: new_state(self.model, self.optimizer, seed), out_shardings=shardings
        )
        state = make(self.config.seed)
        if self.config.train.init_from:
            state = state._replace(params=_params_of(self.config, self.tokenizer, self.abstract))
        return state, 0

    def _batches(self, first: int) -> Iterator[tuple[int, Any]]:
        """Batches on the devices, numbered by the step that takes them."""
        steps = range(first, self.config.train.steps)
        batches = train_batches(self.data, first, self.config.train.steps)
        for step, batch in zip(steps, batches, strict=True):
            yield step, put_batch(self.mesh, batch)

    def _evaluation_due(self, step: int) -> bool:
        train = self.config.train
        return bool(self.valid) and step > 0 and _due(step, train.eval_every_steps, train.steps)

    def _evaluate(
        self, step: int, params: Any, log: MetricsLog, progress: Progress
    ) -> dict[str, float]:
        """Loss and BLEU on the validation pairs, logged."""
        tokens = self.config.data.global_batch_tokens
        values = token_loss(self.eval_step, params, self.valid_encoded, tokens, self.mesh)
        count = min(self.config.train.eval_bleu_sentences, len(self.valid))
        if count:
            chosen = np.linspace(0, len(self.valid) - 1, count).astype(int)
            quality = translation_quality(
                Translator(params, self.config, self.tokenizer),
                [self.valid[i] for i in chosen],
                self.config.data.target_lang,
            )
            values |= {"bleu": quality.bleu, "chrf": quality.chrf, "exact": quality.exact}
        log.write(step, "valid", values)
        progress.note(step, values)
        return values

    def _save(self, step: int, state: TrainState, metrics: dict[str, float] | None) -> None:
        if not np.isfinite(jax.device_get(optax.tree.norm(state.params))):
            raise FloatingPointError(
                f"step {step}: parameters are not finite; the last good checkpoint is "
                f"step {self.checkpoints.latest_step} in {self.run_dir}"
            )
        items = {"params": state.params, "opt_state": state.opt_state}
        self.checkpoints.save(step, items, metrics)

    def final_report(self) -> None:
        """Scores of the best checkpoint on the test parts, some translations, and what to do."""
        if not steps_of(self.run_dir):
            return
        translator = Translator.from_checkpoint(self.run_dir)
        parts = self.splits.test or self.splits.valid
        results = {}
        for name, pairs in parts.items():
            quality = translation_quality(translator, pairs, self.config.data.target_lang)
            results[name] = {k: v for k, v in quality._asdict().items() if k != "hypotheses"}
            print(
                f"{name}: sacreBLEU {quality.bleu:.1f} ({quality.signature}), "
                f"chrF {quality.chrf:.1f}, exact {quality.exact:.1f} % "
                f"of {quality.sentences} sentences, {quality.tokens_per_sec:.0f} tokens/s"
            )
            shown = np.linspace(0, len(pairs) - 1, min(len(pairs), 3)).astype(int)
            for i in shown:
                print(f"    source    {pairs[i].source}")
                print(f"    reference {pairs[i].target}")
                print(f"    model     {quality.hypotheses[i]}")
        (self.run_dir / "results.json").write_text(
            json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        python, where = (shlex.quote(os.path.relpath(p)) for p in (sys.executable, self.run_dir))
        print(
            f"Translate:  echo 'File not found' | {python} "
            f"-m transformer_jax translate --checkpoint {where}"
        )


class _Window:
    """Sums of metrics since the last log line; read from the devices only when it is closed."""

    def __init__(self, schedule: optax.Schedule) -> None:
        self._schedule = schedule
        self._metrics: list[Metrics] = []
        self._start = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        """One step's sums, still on the devices."""
        self._metrics.append(metrics)

    def close(self, step: int) -> dict[str, float]:
        """Means since the last closing, and start anew."""
        if not self._metrics:
            return {}
        host = jax.device_get(self._metrics)
        total = Metrics(*(float(np.sum(field)) for field in zip(*host, strict=True)))
        now = time.perf_counter()
        tokens = max(total.tokens, 1.0)
        values = {
            "loss": total.loss / tokens,
            "nll": total.nll / tokens,
            "teacher_forced_accuracy": total.correct / tokens,
            "grad_norm": total.grad_norm / total.updates,
            "learning_rate": float(np.asarray(self._schedule(step - 1))),
            "target_tokens_per_sec": total.tokens / (now - self._start),
            "steps_per_sec": total.updates / (now - self._start),
        }
        self._metrics, self._start = [], now
        if not np.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss is not finite in the steps up to {step}; nothing of them was saved"
            )
        return values


class _StopSignal:
    """Ctrl-C or SIGTERM: during training the first one asks for a stop after the step, a second one
    leaves at once. Before and after it there is nothing to save, and the first one leaves."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "_StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def after_the_step(self) -> Iterator[None]:
        """Training: a signal is answered when the step is over."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def _ask(self, number: int, _: FrameType | None) -> None:
        if not self._training:
            raise SystemExit(128 + number)
        if self.number is not None:
            os._exit(128 + number)
        self.number = signal.Signals(number)
        print(
            f"{self.number.name}: saving after this step; again to leave at once",
            file=sys.stderr,
            flush=True,
        )


class _Opened(NamedTuple):
    config: Config
    tokenizer: Tokenizer


def _open_run_directory(config: Config, run_dir: Path, splits: Splits) -> _Opened:
    """Config and tokenizer of a run: those that are there, if they fit this config, or new ones."""
    path = run_dir / "config.json"
    if path.exists():
        saved = configs.load(path)
        tokenizer = Tokenizer.load(run_dir / "tokenizer")
        config = _with_vocabulary(config, tokenizer)
        for name, (old, new) in configs.differences(saved, config).items():
            if not name.startswith(configs.RESUMABLE):
                raise ConfigError(
                    f"{configs.flag(name)}: got {new!r}, but {run_dir} was started with {old!r}; "
                    "allowed: the same value, or another --workdir"
                )
        return _Opened(config, tokenizer)
    if steps_of(run_dir):
        raise ConfigError(f"--workdir: {run_dir} holds checkpoints but no config.json")
    if config.train.init_from:
        tokenizer = Tokenizer.load(Path(config.train.init_from) / "tokenizer")
    else:
        logger.info("training the tokenizer")
        tokenizer = Tokenizer.train(splits.train, config.tokenizer)
    config = _with_vocabulary(config, tokenizer)
    tokenizer.save(run_dir / "tokenizer")
    return _Opened(config, tokenizer)


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """The config whose model has a row for each piece."""
    size = config.model.vocab_size
    if size and size < tokenizer.vocab_size:
        raise ConfigError(
            f"--model.vocab-size: got {size}, allowed: 0 or at least {tokenizer.vocab_size}, "
            "the number of pieces of the tokenizer"
        )
    model = dataclasses.replace(config.model, vocab_size=size or tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def _params_of(config: Config, tokenizer: Tokenizer, abstract: TrainState) -> Any:
    other = Path(config.train.init_from).expanduser().absolute()
    step = find_step(other, "best", configs.load(other / "config.json").train.best_metric)
    return load_params(other, step, abstract.params, tokenizer.fingerprint)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
