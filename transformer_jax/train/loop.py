"""The training run: read, train, evaluate, save, stop, go on."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax.checkpoint import Checkpoints, steps_of
from transformer_jax.config import Config, ConfigError
from transformer_jax.data.batching import Encoded
from transformer_jax.data.pipeline import (
    Position,
    TrainData,
    train_batches,
    train_data,
    warn_if_shifted,
)
from transformer_jax.data.sources import Splits, load_splits
from transformer_jax.data.store import encode_pairs
from transformer_jax.decode.translator import Translator
from transformer_jax.evaluate import bleu_of, token_loss, translation_quality
from transformer_jax.model import Model
from transformer_jax.runtime import describe, keep_compiled_programs
from transformer_jax.sharding import batch_shards, make_mesh, put_batch
from transformer_jax.train.metrics import MetricsLog, Progress, Window
from transformer_jax.train.optimizer import learning_rate, make_optimizer
from transformer_jax.train.report import report
from transformer_jax.train.run_directory import (
    open_run_directory,
    params_of_another_run,
    save_config,
)
from transformer_jax.train.state import TrainState, abstract_state, new_state
from transformer_jax.train.step import compile_eval_step, compile_train_step
from transformer_jax.train.stop import StopSignal
from transformer_jax.types import Pair

logger = logging.getLogger(__name__)


def train(config: Config, workdir: Path) -> int:
    """Train a run to its last step, or until a signal; go on where the run directory stands.

    Returns:
        Exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM, with the state saved.

    Raises:
        ConfigError: the configuration, the data or the run directory cannot be used.
    """
    with StopSignal() as stop:
        run = _Run(config, workdir.expanduser().absolute())
        with stop.after_the_step():
            run.to_the_end(stop)
        if stop.number is None and steps_of(run.run_dir):
            report(run.run_dir, run.config, run.splits.test or run.splits.valid)
    return 0 if stop.number is None else 128 + stop.number


class _Run:
    """Everything a run holds while it trains."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        keep_compiled_programs()
        self.run_dir = run_dir
        self.mesh: Mesh = make_mesh(config.mesh)
        bleu_of(config.data.target_lang)  # what is missing is said now, not at the first score
        with_source = config.model.encoder_layers > 0
        self.splits: Splits = load_splits(config.data, with_source)
        logger.info(
            describe(self.mesh)
        )  # after what most often fails, so that a mistake is one line
        self.config, self.tokenizer = open_run_directory(config, run_dir, self.splits.train)
        config = self.config
        self.model = Model(config.model)
        self.optimizer: optax.GradientTransformation = make_optimizer(config)
        self.abstract: TrainState = abstract_state(self.model, self.optimizer, self.mesh)
        self.data: TrainData = train_data(
            self.splits.train,
            self.tokenizer,
            config,
            batch_shards(self.mesh) * config.train.micro_batches,
        )
        logger.info("data: %s", self.data.report)
        sizes = [leaf.size for leaf in jax.tree.leaves(self.abstract.params)]
        logger.info("model: %s parameters", f"{sum(sizes):,}")
        self.valid: list[Pair] = [pair for part in self.splits.valid.values() for pair in part]
        langs = (config.data.source_lang, config.data.target_lang)
        self.valid_encoded: Encoded = encode_pairs(self.valid, self.tokenizer, with_source, *langs)
        warn_if_shifted("validation", self.valid_encoded)
        self.checkpoints = Checkpoints(
            run_dir,
            keep_latest=config.train.keep_checkpoints,
            keep_best=config.train.keep_best,
            best_metric=config.train.best_metric,
            fingerprint=self.tokenizer.fingerprint,
        )
        self.eval_step = compile_eval_step(self.model, self.mesh)
        # Last: a start that failed above leaves nothing that would forbid a corrected one.
        save_config(config, run_dir)

    def to_the_end(self, stop: "StopSignal") -> None:
        """Train until the last step or a signal; the state is saved either way."""
        config = self.config
        try:
            state, first = self._start_state()
            start = position = self._start_position(first)
            step_fn = compile_train_step(
                self.model, self.optimizer, config, self.mesh, self.abstract
            )
            log = MetricsLog(self.run_dir, first)
            last = config.train.steps
            with Progress(first, last) as progress:
                if self._evaluation_due(first) and not log.holds(first, "valid"):
                    # The run was stopped right after this step.
                    values = self._evaluate(first, state.params, log, progress)
                    self._save(first, state, values, position)
                window = Window(learning_rate(config))
                for step, batch, position in self._batches(first, start):
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
                        window = Window(learning_rate(config))
                    if (
                        evaluated
                        or stopping
                        or _due(done, config.train.checkpoint_every_steps, last)
                    ):
                        self._save(done, state, evaluated, position)
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
            abstract = self.abstract.params
            params = params_of_another_run(self.config, self.tokenizer, abstract)
            state = state._replace(params=params)
        return state, 0

    def _start_position(self, first: int) -> Position:
        """Where the saved run stands in its data."""
        saved = self.checkpoints.data_position(first) if first else {}
        if first and not saved:
            raise ConfigError(
                f"--workdir: {self.run_dir}: step {first} was saved without its place in the data; "
                "allowed: a new run, which may start from it with --train.init-from"
            )
        return Position(**saved)

    def _batches(self, first: int, start: Position) -> Iterator[tuple[int, Any, Position]]:
        """Batches on the devices, numbered by the step that takes them, and what comes after."""
        steps = range(first, self.config.train.steps)
        batches = train_batches(self.data, start, len(steps))
        for step, (batch, position) in zip(steps, batches, strict=True):
            yield step, put_batch(self.mesh, batch), position

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
        if count and self.config.model.encoder_layers:
            chosen = np.linspace(0, len(self.valid) - 1, count).astype(int)
            quality = translation_quality(
                Translator(params, self.config, self.tokenizer, self.mesh),
                [self.valid[i] for i in chosen],
                self.config.data.target_lang,
            )
            values |= {"bleu": quality.bleu, "chrf": quality.chrf, "exact": quality.exact}
        log.write(step, "valid", values)
        progress.note(step, values)
        return values

    def _save(
        self,
        step: int,
        state: TrainState,
        metrics: dict[str, float] | None,
        position: Position,
    ) -> None:
        if not np.isfinite(jax.device_get(optax.tree.norm(state.params))):
            raise FloatingPointError(
                f"step {step}: parameters are not finite; the last good checkpoint is "
                f"step {self.checkpoints.latest_step} in {self.run_dir}"
            )
        items = {"params": state.params, "opt_state": state.opt_state}
        self.checkpoints.save(step, items, metrics, position._asdict())


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
