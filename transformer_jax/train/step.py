"""The compiled steps: one update, and one evaluation of the loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from transformer_jax.config import Config
from transformer_jax.model import Model
from transformer_jax.model.dropout import DropoutKey, dropout_key
from transformer_jax.sharding import batch_sharding, replicated
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

    def loss(params: Any) -> tuple[jax.Array, Metrics]:
        metrics = batch_metrics(model, params, batch, config.train.label_smoothing, drop)
        return metrics.loss / jnp.maximum(metrics.tokens, 1.0), metrics

    gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = metrics._replace(grad_norm=optax.tree.norm(gradients))
    return TrainState(state.step + 1, params, opt_state), metrics


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
        return batch_metrics(model, params, batch, 0.0, None)

    return jax.jit(step, out_shardings=replicated(mesh))
