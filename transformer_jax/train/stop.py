"""Ctrl-C and SIGTERM: how a run is asked to stop."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any


def patience_is_over(values: Sequence[dict[str, Any]], metric: str, patience: int) -> bool:
    """Whether the last so many evaluations have brought no new best.

    Args:
        values: of all evaluations of the run, in order, so that a resumed run counts on.
        metric: "loss" (lowest is best) or "bleu" (highest).
        patience: evaluations; 0: for ever.
    """
    if not patience:
        return False
    sign = 1.0 if metric == "bleu" else -1.0
    found = [sign * line[metric] for line in values if metric in line]
    return len(found) > patience and max(found[-patience:]) <= max(found[:-patience])


class StopSignal:
    """During training the first signal asks for a stop after the step, a second one leaves at once.

    Before and after training there is nothing to save, and the first one leaves, in the way that
    was set before.

    Attributes:
        number: the signal that came; None so far.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self._training = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignal":
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

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self._training:
            if callable(before := self._before[signal.Signals(number)]):
                before(number, frame)
            raise SystemExit(128 + number)
        if self.number is not None:
            os._exit(128 + number)
        self.number = signal.Signals(number)
        print(
            f"{self.number.name}: saving after this step; again to leave at once",
            file=sys.stderr,
            flush=True,
        )
