"""Several processes that train together: one is first, decisions are made by all.

Every process runs the same program on the same steps. What only one may do (write a file, print)
is done by the first; what all must agree on is asked here, at the same place of the program.
"""

import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax.config import ConfigError
from transformer_jax.sharding import put, replicated


def join_processes() -> None:
    """Join the other processes: Cloud TPU, SLURM and Open MPI are recognised; else the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is who.

    Raises:
        ConfigError: nothing says it, or the others cannot be reached.
    """
    numbers = [os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID")]
    try:
        count, own = (int(number) if number else None for number in numbers)
        jax.distributed.initialize(num_processes=count, process_id=own)
    except (ValueError, RuntimeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--distributed: {said}; allowed: a Cloud TPU pod, SLURM, Open MPI, or "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment"
        ) from None
    if not is_first():
        logging.getLogger("transformer_jax").setLevel(logging.ERROR)


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


def wait_for_all(where: str) -> None:
    """Go on when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def from_first(values: np.ndarray) -> np.ndarray:
    """The first process's values, in every process; shapes must be the same in all."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def gathered(tree: Any) -> Any:
    """Whole NumPy arrays of a tree that is spread over the devices of all processes."""
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


class Vote:
    """The largest number that any process has named, the same in all of them at the same step.

    With several processes the answer is that of the call before: it is read when the devices have
    it anyway, so that no step waits for a vote.

    Args:
        mesh: all devices of all processes.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._places = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._size, self._before = mesh.size, None

    def __call__(self, number: int) -> int:
        """Take part in the vote; all processes must."""
        if jax.process_count() == 1:
            return number
        mine = put(np.full((self._size,), number, np.int32), self._places)
        before, self._before = self._before, self._largest(mine)
        return 0 if before is None else int(before)
