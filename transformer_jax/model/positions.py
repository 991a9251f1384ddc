"""How the model knows order: sinusoids (section 3.5), and what came after them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig

# A position is split as coarse * _STEP + fine, so that tables stay small at any length.
_STEP = 256


def sinusoids(
    positions: np.ndarray, d_model: int, order: str = "interleaved", exponent: str = "2i/d"
) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos of the same (section 3.5).

    Args:
        positions: [...] numbers.
        d_model: even width.
        order: interleaved: sin and cos of one frequency side by side, as in the paper;
            concatenated: all sines, then all cosines, as in the authors' code.
        exponent: of 1 / 10000 for frequency i: "2i/d" as in the paper, or "i/(d/2-1)" as in the
            authors' code, which reaches 1 / 10000 exactly.

    Returns:
        float64 [..., d_model].
    """
    half = d_model // 2
    i = np.arange(half)
    power = i / half if exponent == "2i/d" else i / max(half - 1, 1)
    angle = np.asarray(positions, np.float64)[..., None] / 10000.0**power
    waves = (np.sin(angle), np.cos(angle))
    if order == "concatenated":
        return np.concatenate(waves, -1)
    return np.stack(waves, -1).reshape(*angle.shape[:-1], d_model)


def sinusoids_at(positions: jax.Array, length: int, config: ModelConfig) -> jax.Array:
    """Sinusoids of positions that are only known on the device.

    Each is put together from two small tables by sin(a + b) = sin a cos b + cos a sin b and
    cos(a + b) = cos a cos b - sin a sin b: exact at any length, where a float32 product of
    position and frequency is not.

    Args:
        positions: int32 [...], below `length`.
        length: bound of the positions; one that is not known yet, in a program for any length,
            counts as 65,536.
        config: width, order and exponent.

    Returns:
        float32 [..., d_model].
    """
    d, exponent = config.d_model, config.sinusoid_exponent
    if not isinstance(length, int):
        length = _STEP * _STEP

    def waves(numbers: np.ndarray) -> list[np.ndarray]:
        table = sinusoids(numbers, d, "concatenated", exponent).astype(np.float32)
        return np.split(table, 2, -1)

    sin, cos = (jnp.asarray(x)[positions % _STEP] for x in waves(np.arange(min(_STEP, length))))
    if length > _STEP:
        coarse = waves(np.arange(0, length, _STEP))
        sin_a, cos_a = (jnp.asarray(x)[positions // _STEP] for x in coarse)
        sin, cos = sin_a * cos + cos_a * sin, cos_a * cos - sin_a * sin
    if config.sinusoid_order == "concatenated":
        return jnp.concatenate([sin, cos], -1)
    return jnp.stack([sin, cos], -1).reshape(*positions.shape, d)


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary embedding (Su et al. 2021): turns pairs of a query or key by position * frequency.

    Element i pairs with element i + K/2. The product of a turned query and a turned key depends
    on their distance alone.

    Args:
        x: [B, H, T, K], K even.
        positions: int32 [B or 1, T].
        base: frequencies are base^(-2i/K).

    Returns:
        As x, computed in float32.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-np.arange(half, dtype=np.float32) / half)
    angle = positions[:, None, :, None].astype(jnp.float32) * frequency
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and bucket of distances, added to the scores (T5)."""

    table: jax.Array  # float32 [buckets, H]
    bidirectional: bool = dataclasses.field(metadata={"static": True})
    max_distance: int = dataclasses.field(metadata={"static": True})

    def __call__(self, distance: jax.Array) -> jax.Array:
        """distance int32 [B or 1, Q, M] (key less query) -> float32 [B or 1, H, Q, M]."""
        buckets = relative_buckets(
            distance, self.bidirectional, self.table.shape[0], self.max_distance
        )
        return jnp.moveaxis(self.table[buckets], -1, 1)


def relative_buckets(
    distance: jax.Array, bidirectional: bool, buckets: int, max_distance: int
) -> jax.Array:
    """Buckets of T5: small distances each their own, larger ones in logarithmic steps.

    Args:
        distance: int32, position of the key less that of the query.
        bidirectional: half of the buckets for keys after the query; else these count as 0.
        buckets: how many.
        max_distance: from here on everything is in the last bucket.

    Returns:
        int32 of the same shape, 0 to buckets - 1.
    """
    first = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        first = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, buckets - 1))
