"""The training run: read, train, evaluate, save, stop, go on."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from transformer_jax.average import average
from transformer_jax.checkpoint import Checkpoints, steps_of
from transformer_jax.config import Config, ConfigError, MeshConfig
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
from transformer_jax.processes import (
    Vote,
    from_first,
    gathered,
    is_first,
    join_processes,
    wait_for_all,
)
from transformer_jax.runtime import describe, enough_memory, keep_compiled_programs
from transformer_jax.sharding import batch_shards, make_mesh, own_rows, put, put_batch, replicated
from transformer_jax.train.evidence import keep_batch
from transformer_jax.train.metrics import MetricsLog, NotFinite, Progress, Window
from transformer_jax.train.optimizer import learning_rate, make_optimizer
from transformer_jax.train.report import report
from transformer_jax.train.run_directory import (
    open_run_directory,
    params_of_another_run,
    save_config,
    write_whole,
)
from transformer_jax.train.state import TrainState, abstract_state, new_state
from transformer_jax.train.step import compile_eval_step, compile_train_step
from transformer_jax.train.stop import StopSignal, patience_is_over
from transformer_jax.types import Batch, Pair

logger = logging.getLogger(__name__)


def train(
    config: Config, workdir: Path, *, distributed: bool = False, require_accelerator: bool = False
) -> int:
    """Train a run to its last step, or until a signal; go on where the run directory stands.

    Args:
        config: of the run.
        workdir: the run directory; with several processes, one that all of them see.
        distributed: join the processes of other machines first.
        require_accelerator: refuse to train on a CPU.

    Returns:
        Exit code: 0, or 130 after Ctrl-C and 143 after SIGTERM, with the state saved.

    Raises:
        ConfigError: the configuration, the data or the run directory cannot be used.
        FloatingPointError: the loss is not finite any more.
        MemoryError: a device is too small.
        OSError: a checkpoint cannot be written.
    """
    if distributed:
        join_processes()  # takes SIGTERM for itself, so our handler comes after
    with StopSignal() as stop:
        if require_accelerator and jax.default_backend() == "cpu":
            raise ConfigError(
                "--require-accelerator: got cpu, allowed: a TPU or GPU that jax can see "
                "(requirements-tpu.txt, requirements-cuda.txt)"
            )
        run = _Run(config, workdir.expanduser().absolute())
        with stop.after_the_step(), enough_memory(run.config):
            run.to_the_end(stop)
        if stop.number is None and jax.process_count() > 1:
            logger.info("trained; the same command without --distributed averages and reports")
        elif stop.number is None and steps_of(run.run_dir):
            if run.config.train.average_last:
                kept = sum(step > 0 for step in steps_of(run.run_dir))
                average(run.run_dir, min(run.config.train.average_last, kept))
            report(run.run_dir, run.config, run.splits.test or run.splits.valid)
    return 0 if stop.number is None else 128 + stop.number


class _Run:
    """Everything a run holds while it trains."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        keep_compiled_programs()
        self.run_dir = run_dir
        self.mesh: Mesh = make_mesh(config.mesh)
        self.share = own_rows(self.mesh)
        bleu_of(config.data.target_lang)  # what is missing is said now, not at the first score
        with_source = config.model.encoder_layers > 0
        self.splits: Splits = load_splits(config.data, with_source)
        logger.info(
            describe(self.mesh)
        )  # after what most often fails, so that a mistake is one line
        if is_first():
            opened = open_run_directory(config, run_dir, self.splits.train)
        wait_for_all("run directory")
        if not is_first():
            opened = open_run_directory(config, run_dir, self.splits.train, makes=False)
        self.config, self.tokenizer = opened
        config = self.config
        if config.train.steps <= config.optimizer.warmup_steps:
            logger.warning(
                "--optimizer.warmup-steps: %d, but the run has only %d steps and stays below "
                "its learning rate",
                config.optimizer.warmup_steps,
                config.train.steps,
            )
        self.model = Model(config.model)
        self.optimizer: optax.GradientTransformation = make_optimizer(config)
        self.averages = config.train.ema_decay > 0
        self.abstract: TrainState = abstract_state(
            self.model, self.optimizer, self.mesh, self.averages
        )
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
            keep_every=config.train.keep_every_steps,
            best_metric=config.train.best_metric,
            fingerprint=self.tokenizer.fingerprint,
        )
        self.eval_step = compile_eval_step(self.model, self.mesh)
        self.norm = jax.jit(optax.tree.norm, out_shardings=replicated(self.mesh))
        self.vote = Vote(self.mesh)
        # Last: a start that failed above leaves nothing that would forbid a corrected one.
        if is_first():
            save_config(config, run_dir)
            summary = json.dumps(self.data.summary(), indent=2)
            write_whole(run_dir / "data.json", summary + "\n")

    def to_the_end(self, stop: StopSignal) -> None:
        """Train until the last step or a signal; the state is saved either way."""
        try:
            state, first = self._start_state()
            start = self._start_position(first)
            last = self.config.train.steps
            self.log = MetricsLog(self.run_dir, first, writes=is_first())
            with Progress(first, last, speaks=is_first()) as self.progress:
                self._steps(state, first, start, stop)
        finally:
            self.checkpoints.close()

    def _steps(self, state: TrainState, first: int, start: Position, stop: StopSignal) -> None:
        train = self.config.train
        if self._evaluation_due(first) and not self._evaluated(first):
            # The run was stopped right after this step.
            self._save(first, state, self._evaluate(first, state), start)
        if first and self._patience_is_over():
            return
        step_fn = compile_train_step(
            self.model, self.optimizer, self.config, self.mesh, self.abstract
        )
        window, recent = Window(learning_rate(self.config)), {}
        for step, batch, position in self._batches(first, start):
            done, recent[step + 1] = step + 1, batch
            on_devices = put_batch(self.mesh, batch, self.share)
            # From here on nothing may go to the devices or come back unasked.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, on_devices)
            window.add(metrics)
            stopping = self.vote(stop.number or 0)
            logs = _due(done, train.log_every_steps, train.steps) or stopping
            evaluates = self._evaluation_due(done) and not stopping
            saves = _due(done, train.checkpoint_every_steps, train.steps)
            if logs or evaluates or saves:
                self._check(window, done, recent)
            if logs:
                values = window.close(done)
                self.log.write(done, "train", values)
                self.progress.update(done, values)
            evaluated, began = None, time.perf_counter()
            if evaluates:
                evaluated = self._evaluate(done, state)
            if evaluates or stopping or saves:
                self._save(done, state, evaluated, position)
            window.leave_out(time.perf_counter() - began)
            if stopping:
                stop.number = signal.Signals(stopping)
                logger.info("stopped by a signal after step %d, saved", done)
                return
            if evaluates and self._patience_is_over():
                logger.info("stopped after step %d: no new best since --train.patience", done)
                return

    def _check(self, window: Window, done: int, recent: dict[int, Batch]) -> None:
        """Stop before anything of a step that is not finite is written."""
        try:
            window.check(done)
        except NotFinite as error:
            kept = keep_batch(self.run_dir, error.step, recent[error.step], self.tokenizer)
            said = f"{error.said}; its batch is in {kept}; {self._last_good()}"
            raise NotFinite(error.step, said) from None
        recent.clear()

    def _start_state(self) -> tuple[TrainState, int]:
        """The saved state, or a fresh one, and the number of steps it has made."""
        step = self.checkpoints.latest_step
        if step is not None:
            items = self.checkpoints.restore(step, self.abstract.items())
            counter = put(np.int32(step), self.abstract.step.sharding)
            logger.info("resumed from step %d", step)
            return TrainState.of_items(counter, items), step
        leaves = jax.tree.leaves(self.abstract)
        kept = self.config.train.keep_checkpoints + self.config.train.keep_best
        self.checkpoints.require_space(sum(x.size * x.dtype.itemsize for x in leaves), kept)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract)
        make = jax.jit(
            lambda seed: new_state(self.model, self.optimizer, seed, self.averages),
            out_shardings=shardings,
        )
        state = make(self.config.seed)
        if self.config.train.init_from:
            abstract = self.abstract.params
            params = params_of_another_run(self.config, self.tokenizer, abstract)
            average = jax.tree.map(jnp.copy, params) if self.averages else None
            state = state._replace(params=params, average=average)
        self.checkpoints.save(0, state.items(), None, Position()._asdict())
        self.checkpoints.wait()  # what cannot be saved is known before it is computed
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

    def _batches(self, first: int, start: Position) -> Iterator[tuple[int, Batch, Position]]:
        """This process's rows of batches, numbered by the step that takes them, and the place
        after each."""
        steps = range(first, self.config.train.steps)
        batches = train_batches(self.data, start, len(steps), self.share)
        for step, (batch, position) in zip(steps, batches, strict=True):
            yield step, batch, position

    def _evaluation_due(self, step: int) -> bool:
        train = self.config.train
        return bool(self.valid) and step > 0 and _due(step, train.eval_every_steps, train.steps)

    def _evaluated(self, step: int) -> bool:
        found = any(line["step"] == step for line in self.log.lines("valid"))
        return bool(from_first(np.array(found)))

    def _patience_is_over(self) -> bool:
        train = self.config.train
        over = patience_is_over(self.log.lines("valid"), train.best_metric, train.patience)
        return bool(from_first(np.array(over)))

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float]:
        """Loss and BLEU on the validation pairs, logged."""
        tokens, params = self.config.data.global_batch_tokens, state.evaluated
        values = token_loss(self.eval_step, params, self.valid_encoded, tokens, self.mesh)
        count = min(self.config.train.eval_bleu_sentences, len(self.valid))
        if count and self.config.model.encoder_layers:
            chosen = np.linspace(0, len(self.valid) - 1, count).astype(int)
            values |= self._quality(params, [self.valid[i] for i in chosen])
        self.log.write(step, "valid", values)
        self.progress.note(step, values)
        return values

    def _quality(self, params: Any, pairs: list[Pair]) -> dict[str, float]:
        """BLEU and its kin of free translations. Of several processes the first translates, on its
        own devices, and tells the others."""
        mesh, names = self.mesh, ("bleu", "chrf", "exact")
        found = np.zeros(len(names))
        if jax.process_count() > 1:
            mesh = make_mesh(MeshConfig(), jax.local_devices())
            params = gathered(params)
        if is_first():
            if jax.process_count() > 1:
                params = jax.device_put(params, replicated(mesh))
            translator = Translator(params, self.config, self.tokenizer, mesh)
            quality = translation_quality(translator, pairs, self.config.data.target_lang)
            found = np.array([getattr(quality, name) for name in names])
        return dict(zip(names, map(float, from_first(found)), strict=True))

    def _save(
        self,
        step: int,
        state: TrainState,
        metrics: dict[str, float] | None,
        position: Position,
    ) -> None:
        if not np.isfinite(jax.device_get(self.norm(state.params))):
            raise FloatingPointError(
                f"step {step}: parameters are not finite; {self._last_good()} in {self.run_dir}"
            )
        self.checkpoints.save(step, state.items(), metrics, position._asdict())

    def _last_good(self) -> str:
        """What is safe, saves under way included."""
        self.checkpoints.wait()
        return f"the last good checkpoint is step {self.checkpoints.latest_step}"


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)
