"""Equation (1) against loops over every query, head and key."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.attention import attention
from transformer_jax.model.dropout import dropout_key
from transformer_jax.model.masks import Mask

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def attention_by_loops(query, key, value, mask):
    """softmax(Q K^T / sqrt(d_k)) V in float64; a query that sees nothing gives zeros."""
    B, H, Q, K = query.shape
    result = np.zeros((B, H, Q, value.shape[-1]))
    for b, h, q in np.ndindex(B, H, Q):
        seen = [m for m in range(key.shape[2]) if mask[b, q, m]]
        scores = [
            sum(float(query[b, h, q, k]) * float(key[b, h, m, k]) for k in range(K)) / math.sqrt(K)
            for m in seen
        ]
        exponentials = [math.exp(score - max(scores)) for score in scores]
        for m, exponential in zip(seen, exponentials, strict=True):
            result[b, h, q] += exponential / sum(exponentials) * value[b, h, m].astype(np.float64)
    return result


def random_inputs(seed, B=2, H=3, Q=4, M=5, K=6, U=7):
    rng = np.random.default_rng(seed)
    shapes = (B, H, Q, K), (B, H, M, K), (B, H, M, U)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_the_loops(masked):
    """Bugs (F55): no 1/sqrt(d_k), or by d_v; softmax over queries or heads; mask not applied."""
    query, key, value = random_inputs(0)
    rng = np.random.default_rng(1)
    mask = rng.random((2, 4, 5)) < 0.5 if masked else np.ones((2, 4, 5), bool)
    mask[1, 2] = not masked  # with a mask, one query that sees nothing
    got = attention(query, key, value, Mask(explicit=mask[:, None]))
    np.testing.assert_allclose(got, attention_by_loops(query, key, value, mask), **TOLERANCE)


def test_keys_in_blocks_are_the_same_keys():
    """Bug: the scores of the blocks come back in another order than the values have."""
    query, key, value = random_inputs(3, H=4, M=15)
    key, value = key[:, :2], value[:, :2]  # each for two query heads
    mask = np.random.default_rng(4).random((2, 4, 15)) < 0.7
    blocks = np.swapaxes(key.reshape(2, 2, 5, 3, -1), 3, 4)
    for implementation in ("plain", "blockwise"):
        got = attention(
            query, blocks, value, Mask(explicit=mask[:, None]), implementation=implementation
        )
        want = attention_by_loops(query, key.repeat(2, 1), value.repeat(2, 1), mask)
        np.testing.assert_allclose(got, want, **TOLERANCE)


def test_a_masked_key_and_value_change_nothing():
    """Bug: masked scores leak through, because they are far, but not far enough, below."""
    query, key, value = random_inputs(2)
    mask = np.ones((2, 1, 1, 5), bool)
    mask[..., 3:] = False
    expected = attention(query, key, value, Mask(explicit=mask))
    key[:, :, 3:], value[:, :, 3:] = 1e4, -1e6
    np.testing.assert_array_equal(attention(query, key, value, Mask(explicit=mask)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_query_that_sees_nothing_gives_zeros_and_finite_gradients(dtype):
    """Bug (F38, F63): softmax over nothing but -inf is NaN, in value or in gradient."""
    query, key, value = (jnp.asarray(x, dtype) for x in random_inputs(3))
    mask = np.ones((2, 1, 4, 5), bool)
    mask[0] = False

    def total(query, key, value):
        result = attention(query, key, value, Mask(explicit=mask))
        return jnp.sum(result.astype(jnp.float32) ** 2 + result), result

    both = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, result), gradients = both(query, key, value)
    assert result.dtype == dtype
    assert not np.asarray(result[0], np.float32).any()
    assert np.asarray(result[1], np.float32).all()
    for gradient in gradients:
        gradient = np.asarray(gradient, np.float32)
        assert np.isfinite(gradient).all()
        assert not gradient[0].any()
        assert gradient[1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_scores_stay_finite(dtype):
    """Bug (F37): exp overflows, a mask constant of the activations' type becomes -inf, or one of
    -1e4 is not below every score."""
    query = jnp.full((1, 1, 3, 4), 100.0, dtype)
    key = jnp.asarray([[[[200.0] * 4, [-200.0] * 4, [300.0] * 4]]], dtype)  # 4e4, -4e4, 6e4
    value = jnp.asarray([[[[1.0], [2.0], [4.0]]]], dtype)
    mask = np.asarray([[[[True, True, False], [True, True, True], [False, True, False]]]])
    result = attention(query, key, value, Mask(explicit=mask))
    np.testing.assert_array_equal(np.asarray(result, np.float32)[0, 0, :, 0], [1.0, 4.0, 2.0])
    total = lambda *inputs: attention(*inputs, Mask(explicit=mask)).astype(jnp.float32).sum()
    for gradient in jax.jit(jax.grad(total, (0, 1, 2)))(query, key, value):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


def test_softmax_is_float32_under_bfloat16():
    """Bug (F54): scores or softmax in bfloat16, where 100 and 100.25 are one number."""
    # Each input, scaled or not, is exact in bfloat16; scores are 100 and 100.25.
    query = jnp.asarray([[[[16.0, 1.0, 0.0, 0.0]]]], jnp.bfloat16)
    key = jnp.asarray([[[[12.5, 0.0, 0.0, 0.0], [12.5, 0.5, 0.0, 0.0]]]], jnp.bfloat16)
    value = jnp.asarray([[[[1.0], [0.0]]]], jnp.bfloat16)
    result = attention(query, key, value, Mask(explicit=np.ones((1, 1, 1, 2), bool)))
    expected = 1 / (1 + math.exp(0.25))  # 0.4378; one number would give 0.5
    assert abs(float(result[0, 0, 0, 0]) - expected) < 2**-9


def test_dropout_of_weights_keeps_the_mean_and_needs_a_key():
    """Bug: weights are dropped without a key, not scaled up, or dropped after the product."""
    H, Q, M, rate = 2, 500, 16, 0.25
    query, key = jnp.zeros((1, H, Q, 4)), jnp.zeros((1, H, M, 4))
    value = jnp.ones((1, H, M, 1))
    mask = np.ones((1, 1, Q, M), bool)
    np.testing.assert_allclose(
        attention(query, key, value, Mask(explicit=mask), dropout_rate=rate), 1.0, rtol=1e-6
    )
    got = np.asarray(
        attention(
            query, key, value, Mask(explicit=mask), dropout_rate=rate, dropout_key=dropout_key(0, 0)
        )
    )[..., 0]
    # Each output is a number of kept weights (0 to 16), each worth 1 / (16 * 0.75).
    kept = got * M * (1 - rate)
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    assert len(np.unique(np.round(kept))) > 5
    total, number = np.round(kept).sum(), H * Q * M
    assert abs(total - number * (1 - rate)) < 5 * math.sqrt(number * rate * (1 - rate))
