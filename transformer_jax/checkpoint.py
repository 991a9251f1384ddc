"""Checkpoints of a run, by Orbax: params and optimizer state as separate items, whole or not there.

A run directory holds config.json, tokenizer/ and checkpoints/STEP/. Reading parameters needs no
optimizer: the items are read by name.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
from orbax.checkpoint import v1 as ocp

from transformer_jax.config import ConfigError
from transformer_jax.processes import is_first, wait_for_all

FORMAT_VERSION = 1
_SAVE_TIMEOUT_SECS = 600
AVERAGE = "average"
logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, for writing and reading.

    Args:
        run_dir: the run directory; made absolute.
        keep_latest: how many of the latest steps stay.
        keep_best: how many of the best steps stay besides.
        keep_every: steps divisible by this stay for ever; 0: none.
        best_metric: "bleu" (highest) or "loss" (lowest) of the metrics that came with a save.
        fingerprint: hash of the tokenizer, saved with each step and compared when reading.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_latest: int,
        keep_best: int,
        best_metric: str,
        fingerprint: str,
        keep_every: int = 0,
    ) -> None:
        policies = ocp.training.preservation_policies
        self._run_dir, self._fingerprint = run_dir, fingerprint
        if is_first():
            _set_aside_broken(checkpoint_root(run_dir))
        wait_for_all("broken checkpoints are set aside")
        latest = policies.LatestN(keep_latest)
        best = policies.BestN(
            get_metric_fn=_goodness(best_metric),
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        kept = [latest, best, *([policies.EveryNSteps(keep_every)] if keep_every else [])]
        self._checkpointer = ocp.training.Checkpointer(
            str(checkpoint_root(run_dir)),
            save_decision_policy=_Always(),
            preservation_policy=cast(Any, policies.AnyPreservationPolicy(kept)),
            cleanup_tmp_directories=True,
            context=_context(),
        )

    def save(
        self,
        step: int,
        items: dict[str, Any],
        metrics: dict[str, float] | None,
        data_position: dict[str, int] | None = None,
    ) -> None:
        """Write items in the background; arrays are copied before this returns.

        Args:
            step: updates made.
            items: trees by name.
            metrics: of this step, to find the best.
            data_position: global counts that say where the run stands in its data.

        Raises:
            SaveError: this save, or one before it, cannot be written.
        """
        metadata = {
            "data_position": data_position,
            "format_version": FORMAT_VERSION,
            "tokenizer": self._fingerprint,
            "metrics": metrics,
        }
        with self._said(f"step {step}"):
            self._checkpointer.save_checkpointables_async(
                step,
                dict(items),  # Orbax adds to it
                force=True,
                overwrite=True,
                metrics=cast(Any, metrics),
                custom_metadata=cast(Any, metadata),
            )

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            SaveError: something cannot be.
        """
        with self._said("the last step"):
            self._checkpointer.wait()

    def require_space(self, state_bytes: int, steps_kept: int) -> None:
        """Ask the disk for room before the first step is made.

        Args:
            state_bytes: size of one checkpoint.
            steps_kept: how many stay at a time; one more is being written.

        Raises:
            ConfigError: not even two fit.
        """
        root = checkpoint_root(self._run_dir)
        free = shutil.disk_usage(root if root.exists() else root.parent).free
        sizes = f"{free / 1e9:.2f} GB free, {state_bytes / 1e9:.2f} GB a checkpoint"
        if free < 2 * state_bytes:
            raise ConfigError(f"--workdir: {self._run_dir}: got {sizes}, allowed: room for two")
        if free < (steps_kept + 1) * state_bytes:
            logger.warning("%s: %s: room for fewer than %d", self._run_dir, sizes, steps_kept + 1)

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Errors of Orbax, of whatever kind, as one that says what is safe."""
        try:
            yield
        except Exception as error:
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            raise SaveError(
                f"{checkpoint_root(self._run_dir)}: {what} cannot be written: {said}; "
                f"the last good checkpoint is step {self.latest_step}"
            ) from error

    @property
    def latest_step(self) -> int | None:
        """The last step that was written whole; None in a fresh run."""
        return max(steps_of(self._run_dir), default=None)

    def data_position(self, step: int) -> dict[str, int]:
        """Where the run stood in its data at a step; empty if that was not saved."""
        metadata = _metadata(checkpoint_root(self._run_dir) / str(step))
        return dict(metadata.get("data_position") or {})

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Read items of one step onto the devices that `abstract` names."""
        path = checkpoint_root(self._run_dir) / str(step)
        return load_items(path, abstract, self._fingerprint)

    def close(self) -> None:
        """Wait until everything is written; errors of the background surface here."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(Exception):  # said already
                self._checkpointer.close()


class SaveError(OSError):
    """A checkpoint could not be written."""


def _context() -> ocp.Context:
    """A directory that cannot be made is said at once, and a disk that hangs is given up."""
    context = ocp.Context()
    context.asynchronous.create_directories_asynchronously = False
    context.asynchronous.timeout_secs = _SAVE_TIMEOUT_SECS
    return context


class _Always:
    """Save whenever asked to: train/loop.py decides when."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return True


def checkpoint_root(run_dir: Path) -> Path:
    """Absolute path of a run's checkpoints.

    Raises:
        ConfigError: the path cannot be said in UTF-8, as TensorStore wants it.
    """
    root = Path(run_dir).expanduser().absolute() / "checkpoints"
    try:
        str(root).encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"--workdir: got {str(run_dir)!a}, which this locale cannot read; "
            "allowed: a path in ASCII, or a UTF-8 locale (and PYTHONUTF8 not 0)"
        ) from None
    return root


def steps_of(run_dir: Path) -> list[int]:
    """Steps that were written whole, ascending; unfinished ones do not count."""
    return sorted(int(path.name) for path in _step_paths(checkpoint_root(run_dir)) if _whole(path))


def find_step(run_dir: Path, which: str | int, best_metric: str) -> int | str:
    """The step that "best", "latest" or a number names, or "average". Without any metric best is
    latest."""
    if which == AVERAGE:
        if not _whole(checkpoint_root(run_dir) / AVERAGE):
            raise ConfigError(f"{run_dir}: got no average, allowed: a run with one; see average")
        return AVERAGE
    steps = steps_of(run_dir)
    if not steps:
        raise ConfigError(f"{run_dir}: got no checkpoint, allowed: a run that has saved a step")
    if which == "latest":
        return steps[-1]
    if which == "best":
        goodness = _goodness(best_metric)
        scored = []
        for step in steps:
            metrics = _metadata(checkpoint_root(run_dir) / str(step)).get("metrics")
            if metrics:
                scored.append((goodness(metrics), step))
        return max(scored)[1] if scored else steps[-1]
    if str(which).isdecimal() and int(which) in steps:
        return int(which)
    raise ConfigError(
        f"{run_dir}: got step {which!r}, allowed: best, latest, average or one of {steps}"
    )


def save_average(run_dir: Path, params: Any, steps: list[int], fingerprint: str) -> Path:
    """Write the mean of the parameters of some steps; it is found as "average".

    Args:
        run_dir: the run directory.
        params: the mean.
        steps: whose, noted in the metadata.
        fingerprint: hash of the tokenizer.
    """
    path = checkpoint_root(run_dir) / AVERAGE
    metadata = {"format_version": FORMAT_VERSION, "tokenizer": fingerprint, "steps": steps}
    ocp.save_checkpointables(
        str(path), {"params": params}, overwrite=True, custom_metadata=cast(Any, metadata)
    )
    return path


def load_params(run_dir: Path, step: int | str, abstract: Any, fingerprint: str) -> Any:
    """The parameters of one step, onto the devices that `abstract` names, without the optimizer."""
    path = checkpoint_root(run_dir) / str(step)
    return load_items(path, {"params": abstract}, fingerprint)["params"]


def load_items(path: Path, abstract: dict[str, Any], fingerprint: str) -> dict[str, Any]:
    """Read named items of one step.

    Raises:
        ConfigError: another tokenizer, a newer format, or parameters that are missing, unexpected
            or of another shape, each by name.
    """
    if not _whole(path):
        raise ConfigError(f"{path}: got no whole checkpoint")
    metadata = _metadata(path)
    version, tokenizer = metadata.get("format_version"), metadata.get("tokenizer")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ConfigError(f"{path}: got format {version!r}, allowed: up to {FORMAT_VERSION}")
    if tokenizer != fingerprint:
        raise ConfigError(
            f"{path}: got weights of tokenizer {str(tokenizer)[:12]}, "
            f"allowed: the tokenizer beside them, {fingerprint[:12]}"
        )
    try:
        saved = ocp.checkpointables_metadata(str(path)).metadata
        for item, tree in abstract.items():
            _compare(path, item, saved.get(item), tree)
        return ocp.load_checkpointables(str(path), abstract)
    except ConfigError:
        raise
    except Exception as error:  # whatever Orbax meets in damaged files
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path}: cannot be read, its files are damaged: {first}") from error


def _step_paths(root: Path) -> list[Path]:
    """Directories that are named like a step, whole or not."""
    found = root.iterdir() if root.is_dir() else ()
    return [path for path in found if path.name.isdecimal() and path.is_dir()]


def _whole(path: Path) -> bool:
    """Orbax renames a directory when it is complete, and writes this file before."""
    plain = not path.name.isdecimal() or path.name == str(int(path.name))  # not 007
    return plain and (path / "_CHECKPOINT_METADATA").is_file()


def _set_aside_broken(root: Path) -> None:
    """Rename what a broken copy or deletion left: Orbax would count it and delete others for it."""
    for path in _step_paths(root):
        if not _whole(path):
            taken = sum(1 for other in root.glob(f"{path.name}.broken*"))
            aside = path.with_name(f"{path.name}.broken{taken or ''}")
            logger.warning("%s is not a whole checkpoint, renamed to %s", path, aside.name)
            path.rename(aside)


def _metadata(path: Path) -> dict[str, Any]:
    return cast(dict, ocp.checkpointables_metadata(str(path)).custom_metadata) or {}


def _goodness(best_metric: str) -> Callable[[Any], float]:
    sign = 1.0 if best_metric == "bleu" else -1.0
    return lambda metrics: sign * float(metrics.get(best_metric, -sign * float("inf")))


def _compare(path: Path, item: str, saved: Any, wanted: Any) -> None:
    """List by name what is missing, unexpected or of another shape."""
    if saved is None:
        raise ConfigError(f"{path}: got no readable item {item!r}")
    have, want = (_shapes(tree) for tree in (saved, wanted))
    faults = [f"missing {name}" for name in sorted(want.keys() - have.keys())]
    faults += [f"unexpected {name}" for name in sorted(have.keys() - want.keys())]
    faults += [
        f"{name} has shape {have[name]}, the model {want[name]}"
        for name in sorted(want.keys() & have.keys())
        if have[name] != want[name]
    ]
    if faults:
        raise ConfigError(f"{path}: {item} does not fit the model: " + "; ".join(faults))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(_key(entry) for entry in keys): tuple(leaf.shape)
        for keys, leaf in leaves
        if hasattr(leaf, "shape")
    }


def _key(entry: Any) -> str:
    """One step of a tree path, by name: a NamedTuple field reads as its name, as Orbax saves it."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
