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


class NotFinite(FloatingPointError):
    """The loss or the gradient of a step is not finite.

    Attributes:
        step: number of the update, counted from 1.
        said: what is not.
    """

    def __init__(self, step: int, said: str) -> None:
        super().__init__(f"step {step}: {said}")
        self.step, self.said = step, said


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

    def check(self, step: int) -> None:
        """Look at all steps up to this one, and keep them.

        Raises:
            NotFinite: the first step whose loss or gradient is not finite.
        """
        self._metrics = jax.device_get(self._metrics)
        for number, one in enumerate(self._metrics, step - len(self._metrics) + 1):
            for name, value in (("loss", one.loss), ("gradient norm", one.grad_norm)):
                if not np.isfinite(value):
                    raise NotFinite(number, f"the {name} is not finite ({float(value)})")

    def leave_out(self, seconds: float) -> None:
        """Time that was not training."""
        self._start += seconds

    def close(self, step: int) -> dict[str, float]:
        """Means since the last closing, and start anew.

        Raises:
            NotFinite: as `check`.
        """
        if not self._metrics:
            return {}
        self.check(step)
        total = Metrics(*(float(np.sum(field)) for field in zip(*self._metrics, strict=True)))
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
        return values


class MetricsLog:
    """metrics.jsonl (one object a line) and TensorBoard of a run.

    Args:
        run_dir: the run directory.
        first: the step that the run goes on from; later lines of an earlier try are dropped.
        writes: False in all processes but one, which then know of no line.
    """

    def __init__(self, run_dir: Path, first: int, writes: bool = True) -> None:
        self._path, self._board = run_dir / "metrics.jsonl", None
        if not writes:
            return
        from tensorboardX import SummaryWriter  # loads torch where that is installed: seconds

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

    def lines(self, part: str) -> list[dict[str, Any]]:
        """All lines of a part, "train" or "valid", in order."""
        if self._board is None:
            return []
        lines = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line["part"] == part]

    def write(self, step: int, part: str, values: dict[str, float]) -> None:
        """One line, safe on disk."""
        if self._board is None:
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "part": part, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(f"{part}/{name}", value, step)
        self._board.flush()


class Progress:
    """A bar on a terminal, plain lines elsewhere; both on stderr.

    Args:
        first: steps made before.
        last: steps to make in all.
        speaks: False in all processes but one.
    """

    def __init__(self, first: int, last: int, speaks: bool = True) -> None:
        self._console = rich.console.Console(stderr=True, quiet=not speaks)
        self._speaks = speaks
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("{task.fields[status]}"),
            console=self._console,
            disable=not (speaks and self._console.is_terminal),
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
        if self._speaks and not self._console.is_terminal:
            print(f"step {step}/{self._last}  {status}", file=sys.stderr, flush=True)

    def note(self, step: int, values: dict[str, float]) -> None:
        """The outcome of an evaluation, as a line that stays."""
        text = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._console.print(f"step {step} validation: {text}", highlight=False, soft_wrap=True)
