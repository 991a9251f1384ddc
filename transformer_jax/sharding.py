"""Where arrays live: the device mesh, and the rules from axis names to mesh axes.

The model names the axes of each parameter; this file alone knows what a name means on a mesh.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

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


def mesh_sizes(config: MeshConfig, devices: int) -> list[int]:
    """Sizes of the mesh axes over so many devices, -1 filled in.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    sizes = [config.data, config.fsdp, config.model]
    known = int(np.prod([size for size in sizes if size > 0]))
    if -1 in sizes and devices % known == 0:
        sizes[sizes.index(-1)] = devices // known
    if int(np.prod(sizes)) != devices:
        raise ConfigError(
            f"--mesh: got data={config.data} fsdp={config.fsdp} model={config.model}, "
            f"allowed: sizes whose product is the number of devices, {devices}"
        )
    return sizes


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The device mesh of the configured sizes.

    Raises:
        ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(config, len(devices))
    # On a TPU the axes follow the wires between the chips.
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES)


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Devices that share the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are spread over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def spread_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """Keep the rows of an activation, along `axis`, spread over data and fsdp, all else whole.

    Where both the rows and a parameter are spread over fsdp, the compiler may otherwise move the
    activations instead of the parameter. Does nothing outside `on_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:  # on one device the constraint would only hinder fusion
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[None] * axis, BATCH_AXES))


def on_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """Inside a compiled function: the mesh that spread_rows goes by."""
    return cast(Any, jax.sharding.use_abstract_mesh(mesh.abstract_mesh))


def param_shardings(mesh: Mesh | AbstractMesh, logical_axes: Any, shapes: Any) -> Any:
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


def put(x: Any, sharding: Sharding) -> jax.Array:
    """A host array that every process holds, as one global array: each gives its own part."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def own_rows(mesh: Mesh) -> tuple[int, int]:
    """Which rows of a batch this process feeds: index and number of equal shares.

    Processes that the model is spread over feed the same rows. (0, 1), all rows, where those of a
    process do not lie together.
    """
    groups = mesh.devices.reshape(batch_shards(mesh), -1)
    own = jax.process_index()
    mine = [i for i, group in enumerate(groups) if any(d.process_index == own for d in group)]
    size, together = len(mine), mine[-1] - mine[0] + 1 == len(mine)
    if together and len(groups) % size == 0 and mine[0] % size == 0:
        return mine[0] // size, len(groups) // size
    return 0, 1


def put_batch(mesh: Mesh, batch: Batch, share: tuple[int, int] = (0, 1)) -> Batch:
    """A host batch as global arrays, rows spread over the devices.

    Args:
        mesh: the device mesh.
        batch: the rows that this process feeds.
        share: which they are, from own_rows; default: all, and every process holds them.
    """
    sharding = batch_sharding(mesh)
    if jax.process_count() == 1:  # all arrays in one call
        return jax.device_put(batch, sharding)
    index, count = share

    def place(rows: np.ndarray) -> jax.Array:
        before = index * len(rows)

        def part(where: Any) -> np.ndarray:  # a slice for each dimension
            start, stop, _ = where[0].indices(count * len(rows))
            return rows[start - before : stop - before]

        shape = (count * len(rows), *rows.shape[1:])
        return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(place, batch)
