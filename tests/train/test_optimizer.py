"""Learning rates by hand, and Adam against a loop in NumPy."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import Config, ModelConfig, OptimizerConfig, TrainConfig
from transformer_jax.train.optimizer import learning_rate, make_optimizer

BASE, BIG = ModelConfig(), ModelConfig(d_model=1024, d_ff=4096, num_heads=16)


def config(model: ModelConfig = BASE, steps: int = 100_000, **fields) -> Config:
    return Config(model=model, optimizer=OptimizerConfig(**fields), train=TrainConfig(steps=steps))


def noam(step: int, d_model: int, warmup: int) -> float:
    """Equation 3 of the paper, for the update number `step`, counted from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


# ---- Schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "peak"), [(BASE, 6.99e-4), (BIG, 4.94e-4)], ids=["base", "big"])
def test_noam_is_the_papers(model: ModelConfig, peak: float):
    """Bug: F109: off by one at the start or the peak, or a missing d_model^-0.5."""
    rate = learning_rate(config(model))
    for count in (0, 1, 3998, 3999, 4000, 4001, 99_999):
        expected = noam(count + 1, model.d_model, 4000)
        np.testing.assert_allclose(rate(count), expected, rtol=1e-6)
    # By hand: 1 / sqrt(512 * 4000) and 1 / sqrt(1024 * 4000).
    assert float(rate(3999)) == pytest.approx(peak, rel=1e-3)
    assert float(rate(3999)) == pytest.approx(1 / math.sqrt(model.d_model * 4000), rel=1e-6)
    assert rate(3998) < rate(3999) > rate(4000)
    assert rate(0) > 0, "the first update moves"
    assert float(rate(0)) == pytest.approx(peak / 4000, rel=1e-3)


def test_noam_has_a_factor():
    """Bug: the learning rate is not a factor of the schedule."""
    assert learning_rate(config(learning_rate=2.0))(7) == 2 * learning_rate(config())(7)


@pytest.mark.parametrize("schedule", ["noam", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 50, 1000])
def test_every_warm_up_is_finite(schedule: str, warmup: int):
    """Bug: F110: warm-up 0, or longer than the run, divides by zero."""
    rate = learning_rate(config(steps=100, schedule=schedule, warmup_steps=warmup))
    values = np.array([rate(jnp.int32(count)) for count in range(105)])
    assert np.isfinite(values).all() and (values >= 0).all() and values[0] > 0


def test_no_warm_up_starts_at_the_top():
    """Bug: F110: warm-up 0 gives rate 0 or infinity."""
    assert learning_rate(config(warmup_steps=0))(0) == pytest.approx(512**-0.5)
    assert learning_rate(config(warmup_steps=1))(0) == pytest.approx(512**-0.5)
    assert learning_rate(config(schedule="constant", warmup_steps=0))(0) == 1.0


def test_constant_and_cosine_by_hand():
    """Bug: the warm-up ends one step late, or the cosine does not end at 0."""
    fields = {"learning_rate": 0.5, "warmup_steps": 10}
    rate = learning_rate(config(steps=110, schedule="constant", **fields))
    for count in range(120):
        assert float(rate(count)) == pytest.approx(0.5 * min(1, (count + 1) / 10))
    rate = learning_rate(config(steps=110, schedule="cosine", **fields))
    for count in (0, 4, 9, 10, 34, 59, 108, 109):
        done = max(0, count + 1 - 10) / 100
        expected = 0.5 * min(1, (count + 1) / 10) * (1 + math.cos(math.pi * done)) / 2
        assert float(rate(count)) == pytest.approx(expected, abs=1e-7)
    assert float(rate(9)) == pytest.approx(0.5) and float(rate(109)) == pytest.approx(0, abs=1e-7)
    assert float(rate(150)) == pytest.approx(0, abs=1e-7), "it does not rise again"


def test_wsd_and_rsqrt_by_hand():
    """Bug: the decay begins a step early or does not end at 0; rsqrt has another peak."""
    wsd = config(schedule="wsd", learning_rate=2.0, warmup_steps=4, decay_share=0.5)
    wsd = replace(wsd, train=replace(wsd.train, steps=20))
    rate = learning_rate(wsd)
    found = [float(rate(step - 1)) for step in (1, 2, 4, 5, 10, 11, 15, 19, 20, 25)]
    np.testing.assert_allclose(found, [0.5, 1, 2, 2, 2, 1.8, 1, 0.2, 0, 0], rtol=1e-6, atol=1e-7)
    rate = learning_rate(config(schedule="rsqrt", learning_rate=2.0, warmup_steps=4))
    found = [float(rate(step - 1)) for step in (1, 2, 4, 16, 400)]
    np.testing.assert_allclose(found, [0.5, 1, 2, 1, 0.2], rtol=1e-6)


def test_a_schedule_can_be_compiled():
    """Bug: Python's min() or int() on a traced counter."""
    for schedule in ("noam", "rsqrt", "cosine", "wsd", "constant"):
        rate = learning_rate(config(schedule=schedule))
        np.testing.assert_allclose(jax.jit(rate)(jnp.int32(17)), rate(17), rtol=1e-6)


# ---- Optimizers ---------------------------------------------------------------------------------


def adam_by_hand(c: Config, start: np.ndarray, gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Adam of Kingma and Ba, algorithm 1, and AdamW's decay beside it, in float64."""
    o = c.optimizer
    x, m, v, found = start.astype(np.float64), 0.0, 0.0, []
    for t, gradient in enumerate(gradients, 1):
        g = gradient.astype(np.float64)
        if o.clip_norm:
            g = g * min(1.0, o.clip_norm / np.sqrt((g**2).sum()))
        m = o.b1 * m + (1 - o.b1) * g
        v = o.b2 * v + (1 - o.b2) * g**2
        step = (m / (1 - o.b1**t)) / (np.sqrt(v / (1 - o.b2**t)) + o.epsilon)
        if o.name == "adamw":
            step = step + o.weight_decay * x
        x = x - noam(t, c.model.d_model, o.warmup_steps) * o.learning_rate * step
        found.append(x)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"b1": 0.5, "b2": 0.9, "epsilon": 1e-2},
        {"name": "adamw", "weight_decay": 0.3},
        {"name": "adam", "weight_decay": 0.3},
        {"clip_norm": 0.5},
    ],
    ids=lambda fields: ",".join(map(str, fields)) or "paper",
)
def test_adam_against_a_loop(fields: dict):
    """Bug: b1, b2 and epsilon change places; another step's rate; decay or clipping is lost."""
    c = config(ModelConfig(d_model=4), warmup_steps=3, **fields)
    draw = np.random.default_rng(0)
    start = draw.normal(size=(3, 4)).astype(np.float32)
    gradients = [(10.0 ** (i - 2) * draw.normal(size=(3, 4))).astype(np.float32) for i in range(5)]
    optimizer = make_optimizer(c)
    params = {"w": jnp.asarray(start)}
    state = optimizer.init(params)
    for gradient, expected in zip(gradients, adam_by_hand(c, start, gradients), strict=True):
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(params["w"], expected, rtol=2e-5, atol=1e-6)


def test_a_parameter_without_gradient_stays():
    """Bug: 0 / 0 in Adam for embeddings of pieces that do not occur."""
    optimizer = make_optimizer(config())
    params = {"w": jnp.ones(3)}
    updates, _ = optimizer.update({"w": jnp.zeros(3)}, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["w"], 0)


def test_clipping_is_global():
    """Bug: each array is clipped by itself, which turns the direction of the update."""
    c = config(clip_norm=1.0, b1=0.0, b2=0.0, epsilon=1e6, learning_rate=1e6, schedule="constant")
    c = replace(c, optimizer=replace(c.optimizer, warmup_steps=0))
    optimizer = make_optimizer(c)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.6, -0.8], rtol=1e-5)
