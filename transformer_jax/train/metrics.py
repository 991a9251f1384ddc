"""What a run tells: metrics.jsonl, TensorBoard, and progress on stderr."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from transformer_jax.types import Metrics


class Window:
    """Sums of metrics since the last log line; read from the devices only when it is closed.

    Args:
        learning_rate: as a function of the updates made before.
    """

    def __init__(self, learning_rate: Callable[[Any], Any]) -> None:
        self._learning_rate = learning_rate
        self._metrics: list[Metrics] = []
        self._start = time.perf_counter()

    def add(self, metrics: Metrics) -> None:
        """One step's sums, still on the devices."""
        self._metrics.append(metrics)

    def close(self, step: int) -> dict[str, float]:
        """Means since the last closing, and start anew.

        Raises:
            FloatingPointError: the loss is not finite.
        """
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
            "learning_rate": float(np.asarray(self._learning_rate(step - 1))),
            "target_tokens_per_sec": total.tokens / (now - self._start),
            "steps_per_sec": total.updates / (now - self._start),
        }
        self._metrics, self._start = [], now
        if not np.isfinite(values["loss"]):
            raise FloatingPointError(
                f"the loss is not finite in the steps up to {step}; nothing of them was saved"
            )
        return values


class MetricsLog:
    """metrics.jsonl (one object a line) and TensorBoard of a run.

    Args:
        run_dir: the run directory.
        first: the step that the run goes on from; later lines of an earlier try are dropped.
    """

    def __init__(self, run_dir: Path, first: int) -> None:
        from tensorboardX import SummaryWriter  # loads torch where that is installed: seconds

        self._path = run_dir / "metrics.jsonl"
        kept = []
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").split("\n"):
                try:
                    if json.loads(line)["step"] <= first:
                        kept.append(line + "\n")
                except (ValueError, KeyError):  # a line cut off by a kill
                    continue
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(self._path)  # whole or not at all
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first or None)

    def holds(self, step: int, part: str) -> bool:
        """Whether a line of this step and part is there."""
        lines = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
        return any(line["step"] == step and line["part"] == part for line in lines)

    def write(self, step: int, part: str, values: dict[str, float]) -> None:
        """One line, safe on disk."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "part": part, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{part}/{name}", value, step)
        self._board.flush()


class Progress:
    """A bar on a terminal, plain lines elsewhere; both on stderr."""

    def __init__(self, first: int, last: int) -> None:
        self._console = rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=last, completed=first, status="compiling")
        self._last = last

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, step: int, values: dict[str, float]) -> None:
        """The state of training after a step."""
        status = (
            f"loss {values['loss']:.3f}  accuracy {values['teacher_forced_accuracy']:.1%}  "
            f"lr {values['learning_rate']:.1e}  {values['target_tokens_per_sec']:.0f} tokens/s"
        )
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal:
            print(f"step {step}/{self._last}  {status}", file=sys.stderr, flush=True)

    def note(self, step: int, values: dict[str, float]) -> None:
        """The outcome of an evaluation, as a line that stays."""
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._console.print(f"step {step} validation: {text}", highlight=False, soft_wrap=True)
