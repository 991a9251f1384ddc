"""Optimizer and learning rate (section 5.3)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer_jax.config import Config


def learning_rate(config: Config) -> optax.Schedule:
    """Learning rate as a function of the number of updates already made, 0, 1, 2, ...

    noam is the paper's: factor * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5) with s = count + 1,
    so the first update already moves. rsqrt is the same curve, named by its peak.
    """
    c = config.optimizer
    scale = c.learning_rate
    if c.schedule == "noam":
        scale *= config.model.d_model**-0.5

    def schedule(count: Any) -> jax.Array:
        s = jnp.asarray(count, jnp.float32) + 1.0
        warm = jnp.minimum(1.0, s / max(c.warmup_steps, 1))
        if c.schedule == "noam":
            return scale * warm / jnp.sqrt(jnp.maximum(s, c.warmup_steps))
        if c.schedule == "rsqrt":
            top = max(c.warmup_steps, 1)
            return scale * warm * jnp.sqrt(top / jnp.maximum(s, top))
        if c.schedule == "constant":
            return scale * warm
        if c.schedule == "wsd":
            decay = max(c.decay_share * config.train.steps, 1.0)
            return scale * warm * jnp.clip((config.train.steps - s) / decay, 0.0, 1.0)
        span = max(config.train.steps - c.warmup_steps, 1)
        done = jnp.clip((s - c.warmup_steps) / span, 0.0, 1.0)
        return scale * warm * 0.5 * (1.0 + jnp.cos(jnp.pi * done))

    return schedule


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """The configured Optax optimizer, gradient clipping first."""
    c = config.optimizer
    if c.name == "muon":
        update = optax.contrib.muon(
            learning_rate(config),
            beta=0.95,
            weight_decay=c.weight_decay,
            adam_b1=c.b1,
            adam_b2=c.b2,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=_matrices,
        )
    elif c.name == "adamw":
        update = optax.adamw(
            learning_rate(config), c.b1, c.b2, c.epsilon, weight_decay=c.weight_decay
        )
    elif c.name == "lion":
        update = optax.lion(learning_rate(config), c.b1, c.b2, weight_decay=c.weight_decay)
    elif c.name == "adafactor":
        update = optax.adafactor(
            learning_rate(config),
            multiply_by_parameter_scale=False,  # the rate means what it means for the others
            weight_decay_rate=c.weight_decay or None,
        )
    else:
        update = optax.adam(learning_rate(config), c.b1, c.b2, c.epsilon)
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), update) if c.clip_norm else update


def _matrices(params: Any) -> Any:
    """How muon reads each parameter as a matrix; None: not one, Adam takes it."""

    def read(path: tuple[Any, ...], _: Any) -> optax.contrib.MuonDimensionNumbers | None:
        name = path[-1].key
        if name in ("query", "key", "value"):
            return optax.contrib.MuonDimensionNumbers(0, (1, 2))
        if name == "out":
            return optax.contrib.MuonDimensionNumbers((0, 1), 2)
        if name in ("inner", "gate", "outer"):
            return optax.contrib.MuonDimensionNumbers(0, 1)
        return None

    return jax.tree_util.tree_map_with_path(read, params)
