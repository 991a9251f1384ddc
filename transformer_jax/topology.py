"""Machines that a run may be planned for, and its compilation for a TPU that is not there.

A topology is a kind and its devices: v5e:2x4 for TPUs, h100:8 for GPUs.
"""

import importlib.util
import math
import os
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from transformer_jax.config import Config, ConfigError
from transformer_jax.model import Model
from transformer_jax.sharding import batch_sharding, make_mesh
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import abstract_state
from transformer_jax.train.step import compile_train_step
from transformer_jax.types import Batch

_COLLECTIVES = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


class Hardware(NamedTuple):
    """One device, from its maker's data sheet."""

    memory_bytes: float
    peak_flops: float  # dense bfloat16 matrix products a second


HARDWARE = {
    "v4": Hardware(32 * 2**30, 275e12),
    "v5e": Hardware(16 * 2**30, 197e12),
    "v5p": Hardware(95 * 2**30, 459e12),
    "v6e": Hardware(32 * 2**30, 918e12),
    "a100": Hardware(80e9, 312e12),
    "h100": Hardware(80e9, 989e12),
    "h200": Hardware(141e9, 989e12),
}
_TPUS = ("v4", "v5e", "v5p", "v6e")


class Topology(NamedTuple):
    """A kind of device and how many of them, in which arrangement."""

    kind: str
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def hardware(self) -> Hardware:
        """One of them."""
        return HARDWARE[self.kind]

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu can compile for it."""
        return self.kind in _TPUS

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"


def parse_topology(text: str) -> Topology:
    """Read KIND:SHAPE, such as v5e:2x4 or h100:8.

    Raises:
        ConfigError: an unknown kind, or a shape that is none.
    """
    found = re.fullmatch(r"([a-z0-9]+):([1-9]\d*(?:x[1-9]\d*)*)", text)
    if not found or found[1] not in HARDWARE:
        raise ConfigError(
            f"--topology: got {text!r}, allowed: KIND:SHAPE such as v5e:2x4 or h100:8, "
            f"KIND one of {', '.join(HARDWARE)}"
        )
    return Topology(found[1], tuple(map(int, found[2].split("x"))))


def can_compile(topology: Topology) -> bool:
    """Whether the compiler for it is installed: libtpu, or the copy of `make plan-tools`."""
    found = "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    return topology.is_tpu and found


def tpu_mesh(config: Config, topology: Topology) -> Mesh:
    """The mesh of a config over TPUs that need not be there.

    Raises:
        ConfigError: there is no such arrangement of these TPUs, or the mesh does not fit it.
    """
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.kind in ("v4", "v5p"):
        options["chip_config_name"] = "megacore"  # both cores of a chip are one device
    if topology.devices == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=str(topology), **options
        )
    except Exception as error:  # whatever libtpu says
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(f"--topology: got {str(topology)!r}: {said}") from None
    return make_mesh(config.mesh, described.devices)


def compile_for(config: Config, topology: Topology, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Compile the train step ahead of time and report the compiler's figures, for each device.

    Args:
        config: with the size of its vocabulary.
        topology: TPUs.
        shape: rows, source length (0: no source) and target length of the batch.
    """
    mesh = tpu_mesh(config, topology)
    model, optimizer = Model(config.model), make_optimizer(config)
    abstract = abstract_state(model, optimizer, mesh, config.train.ema_decay > 0)
    rows, *lengths = shape
    source, target = (
        jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(mesh))
        if length
        else None
        for length in lengths
    )
    batch = Batch(source, source, target, target, target)
    start = time.perf_counter()
    step: Any = compile_train_step(model, optimizer, config, mesh, abstract)
    try:
        compiled = step.lower(abstract, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        said = str(error).strip()
        if "RESOURCE_EXHAUSTED" not in said:
            raise
        return {"fits": False, "compiler_says": said.partition("\n")[0]}
    seconds = time.perf_counter() - start
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    used = {
        name: getattr(memory, f"{name}_size_in_bytes")
        for name in ("argument", "output", "alias", "temp", "generated_code")
    }
    peak = used["argument"] + used["output"] - used["alias"] + used["temp"]
    peak += used["generated_code"]
    return {
        "fits": True,
        "compile_secs": round(seconds, 1),
        "argument_bytes": used["argument"],
        "temporary_bytes": used["temp"],
        "program_bytes": used["generated_code"],
        "peak_bytes": peak,
        # The compiler counts the body of a scan once: for the whole step see flops_per_step.
        "flops_with_scan_bodies_once": (costs or {}).get("flops"),
        "collectives": collectives(compiled.as_text()),
    }


def collectives(program: str) -> dict[str, dict[str, int]]:
    """Kinds of communication in a compiled program: how many, and the bytes of their results.

    Args:
        program: HLO text, of one device.
    """
    found: dict[str, dict[str, int]] = {}
    # name = type operation(...), where an asynchronous one is called operation-start
    pattern = rf"= (\([^=]*?\)|\S+) ({'|'.join(_COLLECTIVES)})(?:-start)?\("
    for result, kind in re.findall(pattern, program):
        entry = found.setdefault(kind, {"count": 0, "bytes": 0})
        entry["count"] += 1
        for item, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", result):
            entry["bytes"] += _ITEM_BYTES.get(item, 0) * math.prod(
                map(int, sizes.split(",")) if sizes else ()
            )
    return found
