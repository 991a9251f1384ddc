"""What JAX runs on: the line that names it, its compiled programs on disk and in memory."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version
from jax.sharding import Mesh

from transformer_jax.config import Config

# Programs that compile faster than this are not worth a file.
_LEAST_COMPILE_SECS = 0.05


def keep_compiled_programs() -> None:
    """Keep compiled programs on disk, so that the next process starts in a fraction of the time.

    They lie in the user's cache directory, apart for each kind of processor. JAX's own
    JAX_COMPILATION_CACHE_DIR, or an application that has set it, comes first.
    """
    if (
        jax.config.values["jax_compilation_cache_dir"]
        or os.environ.get("JAX_COMPILATION_CACHE_DIR") == ""
    ):
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(root) / "transformer_jax" / f"compiled-{_processor()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home: compile anew
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_COMPILE_SECS)


def maps_run_out() -> bool:
    """Whether this process holds half of the memory maps that Linux gives it (65,530).

    On a CPU a compiled program takes dozens of them for each layer of a model, and beyond the last
    one jaxlib ends in a segmentation fault.
    """
    if jax.default_backend() != "cpu":
        return False
    try:
        held = Path("/proc/self/maps").read_bytes().count(b"\n")
        return held > int(Path("/proc/sys/vm/max_map_count").read_text("ascii")) // 2
    except OSError:  # no Linux
        return False


def describe(mesh: Mesh) -> str:
    """Backend, devices, mesh and versions in one line: the first of every run."""
    import flax
    import optax

    shape = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    versions = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
    }
    return (
        f"{jax.default_backend()}: {mesh.size} x {mesh.devices.flat[0].device_kind}, mesh {shape}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
    )


@contextlib.contextmanager
def enough_memory(config: Config) -> Iterator[None]:
    """While a run trains: a device that is too small is said with what would need less.

    Raises:
        MemoryError: with all that the device has said.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "out of memory" not in str(error).lower():
            raise
        train, data = config.train, config.data
        raise MemoryError(
            f"{error}\nThe device has too little memory. What needs less, at the same result: "
            f"--train.micro-batches (now {train.micro_batches}), --model.remat dots or full (now "
            f"{config.model.remat}), more --mesh.fsdp. Otherwise: --data.global-batch-tokens (now "
            f"{data.global_batch_tokens}), --data.max-source-tokens, --data.max-target-tokens, "
            "--model.dtype bfloat16. python -m transformer_jax plan says how much."
        ) from error


def _processor() -> str:
    """Hash of the processor's kind and abilities: machine code must not travel to another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features")
    kind = "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return hashlib.sha256(f"{platform.machine()}{kind}".encode()).hexdigest()[:12]
