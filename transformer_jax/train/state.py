"""The state of training: everything the next step depends on, besides config and data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from transformer_jax.model import Model
from transformer_jax.sharding import param_shardings, replicated


class TrainState(NamedTuple):
    """One value, replaced by each step."""

    step: jax.Array  # int32 []: updates made; also the position in the data
    params: Any
    opt_state: Any
    average: Any = None  # of the parameters over the steps; None: they are used themselves

    @property
    def evaluated(self) -> Any:
        """The parameters that are evaluated and handed on."""
        return self.params if self.average is None else self.average

    def items(self) -> dict[str, Any]:
        """The state as checkpoints name it: `params` are what a user of the model wants."""
        items = {"params": self.evaluated, "opt_state": self.opt_state}
        return items if self.average is None else items | {"current_params": self.params}

    @classmethod
    def of_items(cls, step: jax.Array, items: dict[str, Any]) -> "TrainState":
        """What `items` has named, at a step."""
        if "current_params" in items:
            return cls(step, items["current_params"], items["opt_state"], items["params"])
        return cls(step, items["params"], items["opt_state"])


def new_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    seed: jax.Array | int,
    averages: bool = False,
) -> TrainState:
    """Fresh parameters and optimizer statistics; a pure function of the seed."""
    params = model.init(jax.random.key(seed))
    average = jax.tree.map(jnp.copy, params) if averages else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), average)


def abstract_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    averages: bool = False,
) -> TrainState:
    """Shapes, types and shardings of the state, without allocating any.

    Optimizer statistics are spread like the parameters they belong to; everything else is
    replicated.
    """
    shapes = jax.eval_shape(lambda: new_state(model, optimizer, 0, averages))
    params = param_shardings(mesh, model.logical_axes(), shapes.params)
    known = {
        (_names(path), leaf.shape): sharding
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(shapes.params), jax.tree.leaves(params), strict=True
        )
    }
    depth = max(len(names) for names, _ in known)

    def spread(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        # A statistic of a parameter stands under the parameter's own path, and has its shape.
        names = _names(path)
        ends = [names[len(names) - n :] for n in range(1, min(depth, len(names)) + 1)]
        found = [known[end, leaf.shape] for end in ends if (end, leaf.shape) in known]
        sharding = found[-1] if found else replicated(mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(spread, shapes)


def _names(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
