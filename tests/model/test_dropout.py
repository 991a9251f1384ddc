"""Dropout bits: the right share, and no relation between any two places.

Every threshold is five standard deviations of the binomial distribution (or of the sum of products
of two independent Bernoulli variables), so that nothing here is tuned to the hash.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model import Model
from transformer_jax.model import dropout as dropout_module
from transformer_jax.model.dropout import dropout, dropout_key, random_bits
from transformer_jax.types import Batch

SIGMAS = 5.0
SHAPE = (32, 48, 64)
RATES = dict.fromkeys(
    ("dropout", "embedding_dropout", "attention_dropout", "activation_dropout"), 0.1
)


def dropped(key, rate=0.3, shape=SHAPE) -> np.ndarray:
    """bool, True where an element was dropped."""
    return np.asarray(dropout(jnp.ones(shape), rate, key)) == 0


def assert_independent(first: np.ndarray, second: np.ndarray, rate: float, what: str) -> None:
    """Covariance and joint frequency of two masks of Bernoulli(rate) elements."""
    number = first.size
    deviation = ((first - rate) * (second - rate)).sum() / (math.sqrt(number) * rate * (1 - rate))
    assert abs(deviation) < SIGMAS, f"{what}: covariance at {deviation:.1f} sigma"
    both = rate * rate
    deviation = ((first & second).sum() - number * both) / math.sqrt(number * both * (1 - both))
    assert abs(deviation) < SIGMAS, f"{what}: joint frequency at {deviation:.1f} sigma"


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_rate_is_exact(rate):
    """Bug: keep and drop are exchanged, or few bits of the word make a coarse threshold."""
    for seed in range(4):
        mask = dropped(dropout_key(seed, 7), rate)
        deviation = (mask.sum() - mask.size * rate) / math.sqrt(mask.size * rate * (1 - rate))
        assert abs(deviation) < SIGMAS


def test_kept_elements_are_scaled_and_keep_sign_and_type():
    """Bug: no scaling by 1 / (1 - rate), so that evaluation sees other magnitudes."""
    x = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    for dtype in ("float32", "bfloat16"):
        y = dropout(jnp.asarray(x, dtype), 0.2, dropout_key(0, 0))
        assert y.dtype == dtype
        wide, kept = np.asarray(y, np.float32), np.asarray(y) != 0
        expected = np.asarray(jnp.asarray(x, dtype), np.float32)[kept] / 0.8
        np.testing.assert_allclose(wide[kept], expected, rtol=1e-6 if dtype == "float32" else 2**-7)


def test_no_key_or_no_rate_is_the_identity():
    """Bug (F61): dropout stays on outside training."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, dropout_key(0, 0)) is x


def test_a_rate_near_zero_drops_nothing_and_does_not_overflow():
    """Bug: the threshold 2**32 does not fit into 32 bits."""
    assert not dropped(dropout_key(0, 0), 1e-12).any()


def test_gradient_is_the_mask():
    """Bug: backward uses other bits than forward."""
    key = dropout_key(1, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 50)).astype(np.float32))
    gradient = jax.grad(lambda x: dropout(x, 0.4, key).sum())(x)
    np.testing.assert_allclose(gradient, np.asarray(dropout(x, 0.4, key) / x), rtol=1e-5)


def test_bits_are_a_pure_function_of_the_key():
    """Bug: hidden state, or other bits under jit."""
    eager = random_bits((4, 5, 6), dropout_key(3, 4).fold(2))
    compiled = jax.jit(lambda s, t: random_bits((4, 5, 6), dropout_key(s, t).fold(2)))(3, 4)
    np.testing.assert_array_equal(eager, compiled)
    assert eager.dtype == jnp.uint32


@pytest.mark.parametrize("rows", [(4, 4), (1, 7), (2, 3, 3)])
def test_a_split_batch_drops_the_same_elements(rows):
    """Bug: bits depend on the place in the micro-batch, not in the global batch."""
    key, size = dropout_key(5, 6).fold(1), sum(rows)
    whole = random_bits((size, 3, 7), key)
    part = jax.jit(
        lambda first, n: random_bits((n, 3, 7), key._replace(first_row=first)), static_argnums=1
    )
    starts = np.cumsum([0, *rows[:-1]])
    parts = [part(start, n) for start, n in zip(starts, rows, strict=True)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_a_longer_batch_changes_no_bit_of_the_rows_before():
    """Bug: the row count enters the place of an element, so filler rows change the bits."""
    key = dropout_key(5, 6)
    np.testing.assert_array_equal(random_bits((8, 3, 7), key)[:5], random_bits((5, 3, 7), key))


def test_equal_rows_get_different_masks():
    """Bug (F50): rows on different devices, or simply different rows, share one mask."""
    mask = dropped(dropout_key(0, 0), 0.5, (16, 4096))
    for a, b in itertools.combinations(range(16), 2):
        assert_independent(mask[a], mask[b], 0.5, f"rows {a} and {b}")


def test_rows_are_no_permutations_of_one_another():
    """Bug: the row only shifts or permutes the words, so any two rows drop the same number."""
    words_of = jax.jit(lambda first: random_bits((512, 4096), key._replace(first_row=first)))
    key, extremes = dropout_key(0, 0), set()
    for first in range(0, 4096, 512):
        words = np.asarray(words_of(first))
        extremes |= set(zip(words.min(1).tolist(), words.max(1).tolist(), strict=True))
    # Permuted rows have the same smallest and largest word; by chance about 4096**2 / 2**41.
    assert len(extremes) == 4096
    counts = dropped(dropout_key(0, 0), 0.5, (256, 4096)).sum(1)
    # Binomial: variance 1024. Its estimate from 256 rows is within 5 * sqrt(2 / 256) = 44 %.
    assert abs(counts.var() / 1024 - 1) < SIGMAS * math.sqrt(2 / 256)


KEYS = {
    "seeds": [dropout_key(seed, 1) for seed in (0, 1, 2, 3, 1000, 2**31)],
    "steps": [dropout_key(0, step) for step in (0, 1, 2, 3, 4, 100_000)],
    "sites": [dropout_key(0, 0).fold(site) for site in (0, 1, 2, 3, 4, 1000, 1001)],
    "seed, step and site": [
        dropout_key(1, 0),
        dropout_key(0, 1),
        dropout_key(0, 0).fold(1),
        dropout_key(0, 0).fold(0).fold(1),
        dropout_key(0, 0).fold(1).fold(0),
        dropout_key(0, 1).fold(0),
    ],
}


@pytest.mark.parametrize("kind", KEYS)
def test_different_keys_draw_unrelated_bits(kind):
    """Bugs (F51): one key for every step, site or seed; or keys that only shift each other."""
    masks = [dropped(key) for key in KEYS[kind]]
    for (i, a), (j, b) in itertools.combinations(enumerate(masks), 2):
        assert_independent(a, b, 0.3, f"{kind} {i} and {j}")
        for shift in (1, SHAPE[2], SHAPE[1] * SHAPE[2]):
            what = f"{kind} {i} and {j}, shifted by {shift}"
            assert_independent(a.ravel()[shift:], b.ravel()[:-shift], 0.3, what)


def test_neighbours_are_unrelated():
    """Bug: a weak hash of consecutive places, visible as stripes along an axis."""
    for seed in range(3):
        mask = dropped(dropout_key(seed, 0), 0.5)
        for axis, distance in itertools.product(range(3), (1, 2, 3, 4, 8, 16)):
            length = mask.shape[axis]
            first = mask.take(range(length - distance), axis)
            second = mask.take(range(distance, length), axis)
            assert_independent(first, second, 0.5, f"axis {axis}, distance {distance}")


def test_corners_of_rectangles_are_unrelated():
    """Bug: word = f(row) xor g(place): pairs look random, yet four corners always cancel."""
    for seed in range(3):
        sign = np.where(dropped(dropout_key(seed, 0), 0.5, (256, 1024)), -1, 1)
        for rows, columns in itertools.product((1, 2, 8, 128), (1, 2, 64, 512)):
            tall = sign[rows:] * sign[:-rows]
            corners = tall[:, columns:] * tall[:, :-columns]
            assert abs(corners.sum()) < SIGMAS * math.sqrt(corners.size)


def test_low_rates_are_unrelated_too():
    """Bug: only the lowest bits of the word are well mixed."""
    masks = [dropped(dropout_key(0, step), 0.05) for step in range(5)]
    for a, b in itertools.combinations(masks, 2):
        assert_independent(a, b, 0.05, "rate 0.05")


def test_every_site_of_the_model_has_a_key_of_its_own(tiny_config, monkeypatch):
    """Bug: two places of the model, or two layers, or the two stacks, share their bits."""
    seeds = []
    original = dropout_module.random_bits

    def record(shape, key, *block):
        seeds.append(key.seed)
        return original(shape, key, *block)

    monkeypatch.setattr(dropout_module, "random_bits", record)
    model = Model(dataclasses.replace(tiny_config, **RATES))
    ids = jnp.zeros((1, 2), jnp.int32)

    def keys_of_sites():
        seeds.clear()
        model.apply(model.init(jax.random.key(0)), ids, ids, drop=dropout_key(0, 0))
        return list(seeds)

    found = [int(seed) for seed in jax.jit(keys_of_sites)()]
    # One for the embeddings of each stack; in each layer one for the output of every sublayer,
    # one for the weights of every attention, one inside the feed-forward sublayer.
    encoder = 1 + tiny_config.encoder_layers * (2 + 1 + 1)
    decoder = 1 + tiny_config.decoder_layers * (3 + 2 + 1)
    assert len(found) == encoder + decoder
    assert len(set(found)) == len(found)


def test_a_model_on_half_a_batch_drops_what_it_drops_on_the_whole(tiny_config):
    """Bugs: a site hashes another axis than the global row (heads, flattened rows), or first_row
    is lost on the way; micro-batches would then train another model. No key: no dropout (F61)."""
    shallow = dataclasses.replace(tiny_config, encoder_layers=1, decoder_layers=1)
    model = Model(dataclasses.replace(shallow, **RATES))
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * leaf.shape[0] ** -0.5
    params = jax.tree.map(draw, model.abstract_params())
    ids = rng.integers(4, 40, (2, 4, 5)).astype(np.int32)
    ones = np.ones((4, 5), np.int32)
    batch = Batch(ids[0], ones, ids[1], ids[1], ones)
    half = lambda rows: Batch(*(None if x is None else x[rows] for x in batch))
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    key, hidden = dropout_key(0, 3), jax.jit(model.hidden, compiler_options=quick)
    whole = np.asarray(hidden(params, batch, key))
    for first in (0, 2):
        part = hidden(params, half(slice(first, first + 2)), key._replace(first_row=first))
        np.testing.assert_allclose(part, whole[first : first + 2], rtol=1e-5, atol=1e-5)
    other = np.asarray(hidden(params, batch, dropout_key(0, 4)))
    assert (np.abs(other - whole).max((1, 2)) > 1e-2).all()
    still = np.asarray(hidden(params, batch))
    assert (np.abs(still - whole).max((1, 2)) > 1e-2).all()
    np.testing.assert_array_equal(still, hidden(params, batch))
