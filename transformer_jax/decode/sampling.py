"""Sampling: hypotheses drawn from the distribution of a step function, as search.py has it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from transformer_jax.decode.search import (
    DEAD,
    BeamSearch,
    BeamState,
    SearchResult,
    StepFunction,
    merge,
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Draws instead of a search, in the same three parts; the W slots are W draws.

    Attributes:
        beam_size: W, draws of each sentence.
        eos_id: the token that ends a draw.
        temperature: logits are divided by it; 0: the likeliest token.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that have this much probability together; 1: all.
        min_p: only tokens with at least this share of the likeliest one's probability.
        min_length: tokens that a draw has at least before EOS.
    """

    beam_size: int
    eos_id: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_length: int = 0

    def start(
        self, cache: Any, first_token: jax.Array, limit: jax.Array, max_len: int, **given: Any
    ) -> BeamState:
        """As BeamSearch.start; all slots are live. `seed` decides what a sentence draws."""
        search = BeamSearch(self.beam_size, self.eos_id)
        state = search.start(cache, first_token, limit, max_len, **given)
        return state._replace(log_prob=jnp.broadcast_to(state.log_prob[:, :1], state.parent.shape))

    def advance(
        self,
        step_fn: StepFunction,
        state: BeamState,
        until: jax.Array | int,
        allowed: jax.Array | None = None,
    ) -> BeamState:
        """As BeamSearch.advance."""

        def step(state: BeamState) -> BeamState:
            logits, cache = step_fn(state.token, None, state.cache)
            log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
            token = self._draw(state, log_probs, allowed)
            gain = jnp.take_along_axis(log_probs, token[:, :, None], 2)[:, :, 0]
            return self._extend(state._replace(cache=cache), state.log_prob + gain, token)

        go_on = lambda state: state.active.any() & (state.time < until)
        return lax.while_loop(go_on, step, state)

    def finish(self, state: BeamState) -> SearchResult:
        """All draws, finished ones first, likeliest first; log_prob is without temperature."""
        return BeamSearch(self.beam_size, self.eos_id).finish(state)

    def _draw(self, state: BeamState, log_probs: jax.Array, allowed: jax.Array | None) -> jax.Array:
        """One token for each slot, [B, W]."""
        masked = BeamSearch(1, self.eos_id, min_length=self.min_length).forbid(
            state, log_probs, allowed
        )
        if self.temperature == 0:
            return jnp.argmax(masked, -1).astype(jnp.int32)
        choice = jnp.maximum(masked / self.temperature, DEAD)
        if self.top_k:
            least = lax.top_k(choice, min(self.top_k, choice.shape[2]))[0][:, :, -1:]
            choice = jnp.where(choice >= least, choice, DEAD)
        if self.top_p < 1:
            ordered = jnp.sort(choice, -1, descending=True)
            shares = jax.nn.softmax(ordered)
            inside = jnp.cumsum(shares, -1) - shares < self.top_p  # the likeliest always is
            least = jnp.where(inside, ordered, jnp.inf).min(-1, keepdims=True)
            choice = jnp.where(choice >= least, choice, DEAD)
        if self.min_p:
            least = choice.max(-1, keepdims=True) + math.log(self.min_p)
            choice = jnp.where(choice >= least, choice, DEAD)

        def noise(seed: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed), state.time)
            return jax.random.gumbel(key, choice.shape[1:])

        return jnp.argmax(choice + jax.vmap(noise)(state.seed), -1).astype(jnp.int32)

    def _extend(self, state: BeamState, log_prob: jax.Array, token: jax.Array) -> BeamState:
        live = (state.log_prob > DEAD / 2) & state.active[:, None]
        length = state.time + 1
        ids = lax.dynamic_update_slice_in_dim(state.ids, token[:, :, None], state.time, 2)
        ids = jnp.where(live[:, :, None], ids, state.ids)
        ended = live & (token == self.eos_id)
        done = merge(state.done, ids, log_prob, log_prob, ended)
        broken = live & jnp.isnan(log_prob)
        log_prob = jnp.where(live & ~ended, log_prob, DEAD)
        log_prob = jnp.where(
            broken, jnp.nan, jnp.where(state.active[:, None], log_prob, state.log_prob)
        )
        going = (live & ~ended & ~broken).any(1)
        return state._replace(
            time=length,
            token=token,
            ids=ids,
            log_prob=log_prob,
            length=jnp.where(state.active, length + state.offset, state.length),
            active=state.active & going & (length + state.offset < state.limit),
            done=done,
        )


def sample(
    step_fn: StepFunction,
    cache: Any,
    first_token: jax.Array,
    *,
    max_len: int,
    limit: jax.Array,
    eos_id: int,
    seed: jax.Array,
    num_samples: int = 1,
    allowed: jax.Array | None = None,
    **options: Any,
) -> SearchResult:
    """Draw continuations of `first_token`; arguments as in beam_search.

    Args:
        step_fn: as in beam_search, with W = num_samples; its parent is None.
        cache: whatever step_fn takes.
        first_token: int32 [B].
        max_len: T.
        limit: int32 [B].
        eos_id: the token that ends a draw.
        seed: int32 [B]; what a sentence draws follows from its own seed alone.
        num_samples: draws of each sentence.
        allowed: bool [V], tokens that may be drawn.
        **options: further attributes of Sampling.
    """
    sampling = Sampling(num_samples, eos_id, **options)
    limit = jnp.minimum(limit, max_len)
    state = sampling.start(cache, first_token, limit, max_len, seed=seed)
    return sampling.finish(sampling.advance(step_fn, state, max_len, allowed))
