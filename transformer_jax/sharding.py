"""Where arrays live: the device mesh, and the rules from axis names to mesh axes.

The model names the axes of each parameter; this file alone knows what a name means on a mesh.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError, MeshConfig
from transformer_jax.types import Batch

logger = logging.getLogger(__name__)

MESH_AXES = ("data", "fsdp", "model")

# Logical axis -> mesh axis (None: replicated). An unknown name is an error.
RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "d_k": None,
    "d_v": None,
    "positions": None,
    "buckets": None,
}
BATCH_AXES = ("data", "fsdp")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The device mesh of the configured sizes.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.model]
    known = int(np.prod([size for size in sizes if size > 0]))
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if int(np.prod(sizes)) != len(devices):
        raise ConfigError(
            f"--mesh: got data={config.data} fsdp={config.fsdp} model={config.model}, "
            f"allowed: sizes whose product is the number of devices, {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(sizes), MESH_AXES)


def batch_shards(mesh: Mesh) -> int:
    """Devices that share the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are spread over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def param_shardings(mesh: Mesh, logical_axes: Any, shapes: Any) -> Any:
    """A NamedSharding for each parameter, from the names of its axes.

    Args:
        mesh: the device mesh.
        logical_axes: tree of PartitionSpecs of axis names, one name for each dimension.
        shapes: tree of the same structure whose leaves have a shape.

    A dimension that the mesh axis does not divide is replicated.
    """

    def spread(names: PartitionSpec, leaf: Any) -> NamedSharding:
        axes = []
        for name, size in zip(names, leaf.shape, strict=True):
            axis = RULES[name]
            axes.append(axis if axis is not None and size % mesh.shape[axis] == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*axes))

    is_spec = lambda x: isinstance(x, PartitionSpec)
    return jax.tree.map(spread, logical_axes, shapes, is_leaf=is_spec)


def put_batch(mesh: Mesh, batch: Batch) -> Batch:
    """A host batch as global arrays, rows spread over the devices."""
    return jax.device_put(batch, batch_sharding(mesh))
