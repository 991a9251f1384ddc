"""The state of training: everything the next step depends on, besides config and data."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from transformer_jax.model import Model
from transformer_jax.sharding import param_shardings, replicated


class TrainState(NamedTuple):
    """One value, replaced by each step."""

    step: jax.Array  # int32 []: updates made; also the position in the data
    params: Any
    opt_state: Any


def new_state(
    model: Model, optimizer: optax.GradientTransformation, seed: jax.Array | int
) -> TrainState:
    """Fresh parameters and optimizer statistics; a pure function of the seed."""
    params = model.init(jax.random.key(seed))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def abstract_state(model: Model, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of the state, without allocating any.

    Optimizer statistics are spread like the parameters they belong to; everything else is
    replicated.
    """
    shapes = jax.eval_shape(lambda: new_state(model, optimizer, 0))
    params = param_shardings(mesh, model.logical_axes(), shapes.params)
    everywhere = jax.tree.map(lambda _: replicated(mesh), shapes)
    like_params = optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, everywhere.opt_state, params
    )
    shardings = TrainState(everywhere.step, params, like_params)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
