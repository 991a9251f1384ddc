"""The compiled steps: one update, and one evaluation of the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from transformer_jax.config import Config
from transformer_jax.model import Model
from transformer_jax.model.dropout import DropoutKey, dropout_key
from transformer_jax.sharding import batch_sharding, on_mesh, replicated, spread_rows
from transformer_jax.train.loss import smoothed_cross_entropy
from transformer_jax.train.state import TrainState
from transformer_jax.types import Batch, Metrics


def batch_metrics(
    model: Model, params: Any, batch: Batch, label_smoothing: float, drop: DropoutKey | None
) -> Metrics:
    """Loss sums of a batch; with `drop` None nothing is random."""
    hidden = model.hidden(params, batch, drop)
    weights = (batch.tgt_segments > 0).astype(jnp.float32)
    table, bias = model.output_projection(params)
    targets = batch.tgt_out_ids
    return smoothed_cross_entropy(hidden, table, targets, weights, label_smoothing, bias)


def summed_gradients(
    params: Any, batch: Batch, drop: DropoutKey, *, model: Model, config: Config
) -> tuple[Any, Metrics]:
    """Gradient of the summed loss, and the sums, over the micro-batches of a batch.

    Only sums are added up, so the split changes nothing but memory: not the weight of a token, and
    not its dropout, which goes by the row of the whole batch.
    """

    def of(micro: Batch, first_row: jax.Array | int) -> tuple[Any, Metrics]:
        def loss(params: Any) -> tuple[jax.Array, Metrics]:
            own = drop._replace(first_row=first_row)
            metrics = batch_metrics(model, params, micro, config.train.label_smoothing, own)
            return metrics.loss, metrics

        return jax.grad(loss, has_aux=True)(params)

    count = config.train.micro_batches
    if count == 1:
        return of(batch, 0)
    rows = batch.tgt_in_ids.shape[0] // count

    # The rows of each part are spread over all devices.
    split = lambda x: spread_rows(x.reshape(count, rows, *x.shape[1:]), axis=1)
    parts = jax.tree.map(split, batch), jnp.arange(count, dtype=jnp.uint32) * rows
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of, batch, 0))
    add = lambda total, part: (jax.tree.map(jnp.add, total, of(*part)), None)
    return lax.scan(add, zeros, parts)[0]


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    model: Model,
    optimizer: optax.GradientTransformation,
    config: Config,
) -> tuple[TrainState, Metrics]:
    """One update: the gradient of the loss per real target token of the global batch."""
    drop = dropout_key(config.seed, state.step)
    gradients, metrics = summed_gradients(state.params, batch, drop, model=model, config=config)
    scale = 1.0 / jnp.maximum(metrics.tokens, 1.0)
    gradients = jax.tree.map(lambda g: g * scale, gradients)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = metrics._replace(grad_norm=optax.tree.norm(gradients), updates=jnp.ones(()))
    average = state.average
    if average is not None:
        # While young, a plain mean: the first parameters are noise, and would weigh for long.
        decay = jnp.minimum(config.train.ema_decay, state.step / (state.step + 1.0))
        average = jax.tree.map(lambda a, p: a + (1.0 - decay) * (p - a), average, params)
    return TrainState(state.step + 1, params, opt_state, average), metrics


def compile_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: Config,
    mesh: Mesh,
    abstract: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """train_step over the mesh. The state that goes in is donated: use the one that comes out."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        with on_mesh(mesh):
            return train_step(state, batch, model=model, optimizer=optimizer, config=config)

    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def compile_eval_step(model: Model, mesh: Mesh) -> Callable[[Any, Batch], Metrics]:
    """Plain cross-entropy sums of one batch, without dropout and without smoothing."""

    def step(params: Any, batch: Batch) -> Metrics:
        with on_mesh(mesh):
            return batch_metrics(model, params, batch, 0.0, None)

    return jax.jit(step, out_shardings=replicated(mesh))
