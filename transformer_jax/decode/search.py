"""Beam search (section 6.1): a pure algorithm over a step function; no model in sight.

The rule, exactly. Each step takes the W best of all W * V continuations. Those that end in EOS are
finished and leave their slots empty. A sentence ends when no slot is live, or when no live
hypothesis can still beat the finished ones that were asked for. With W = 1 this is greedy search.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# A log-probability no hypothesis has: finite, so that sums of it stay numbers.
DEAD = -1e30

StepFunction = Callable[[jax.Array, jax.Array | None, Any], tuple[jax.Array, Any]]


class SearchResult(NamedTuple):
    """The hypotheses of each sentence: finished ones first, best first."""

    ids: jax.Array  # int32 [B, n, T], EOS included, 0 after it
    log_prob: jax.Array  # float32 [B, n], sum over the tokens, EOS included
    score: jax.Array  # float32 [B, n], log_prob over the length penalty
    finished: jax.Array  # bool [B, n]: ended in EOS, not at the limit


class _State(NamedTuple):
    """Carried through the loop."""

    time: jax.Array  # int32 []: tokens chosen so far
    cache: Any
    token: jax.Array  # int32 [B, W], the last token of each live hypothesis
    parent: jax.Array  # int32 [B, W], the slot it continues
    ids: jax.Array  # int32 [B, W, T]
    log_prob: jax.Array  # float32 [B, W], DEAD in an empty slot
    length: jax.Array  # int32 [B], tokens of the live hypotheses
    active: jax.Array  # bool [B]: the sentence still goes on
    done: SearchResult  # [B, n]


def length_penalty(length: jax.Array | int, alpha: float, form: str = "paper") -> jax.Array:
    """What log_prob is divided by; length counts EOS. alpha 0: by 1.

    Args:
        length: tokens of the hypothesis.
        alpha: how much long hypotheses are favoured.
        form: "paper": ((5 + length) / 6) ** alpha; "power": length ** alpha, as in other toolkits.
    """
    length = jnp.asarray(length, jnp.float32)
    return (length if form == "power" else (5.0 + length) / 6.0) ** alpha


Penalty = Callable[[jax.Array], jax.Array]


def _penalty(alpha: float, form: str) -> Penalty:
    return lambda length: length_penalty(length, alpha, form)


def beam_search(
    step_fn: StepFunction,
    cache: Any,
    first_token: jax.Array,
    *,
    beam_size: int,
    max_len: int,
    limit: jax.Array,
    length_penalty: float,
    eos_id: int,
    num_hypotheses: int | None = None,
    allowed: jax.Array | None = None,
    length_penalty_form: str = "paper",
) -> SearchResult:
    """The best continuations of `first_token` under step_fn.

    Args:
        step_fn: (token [B, W], parent [B, W] or None, cache) -> (logits [B, W, V], cache). Token
            w continues the hypothesis that stood in slot parent[w]; the cache's owner reorders.
        cache: whatever step_fn takes.
        first_token: int32 [B], not part of the result.
        beam_size: W.
        max_len: T, the static size of the result.
        limit: int32 [B], tokens that each sentence may have, EOS included; max_len is a limit too.
        length_penalty: alpha.
        eos_id: the token that ends a hypothesis.
        num_hypotheses: n, how many are wanted and searched for exactly; None: W.
        allowed: bool [V], tokens that may be chosen; None: all. Probabilities are not renormalised.
        length_penalty_form: form of length_penalty().

    Returns:
        SearchResult. Where fewer than n hypotheses finished, live ones at the limit follow; where
        even these are fewer, empty ones of score DEAD. A sentence for which step_fn gives NaN
        ends at once, with a first hypothesis of log_prob NaN.
    """
    limit = jnp.minimum(limit, max_len)
    grows, penalty = length_penalty >= 0, _penalty(length_penalty, length_penalty_form)
    n, W, B = num_hypotheses or beam_size, beam_size, first_token.shape[0]
    state = _start(cache, first_token, limit, W, n, max_len)

    def go_on(state: _State) -> jax.Array:
        return state.active.any()

    def advance(state: _State) -> _State:
        parent = None if W == 1 else state.parent
        logits, cache = step_fn(state.token, parent, state.cache)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        # One NaN among the logits makes NaN of all the log_probs of its slot.
        broken = (jnp.isnan(log_probs[:, :, 0]) & (state.log_prob > DEAD / 2)).any(1)
        if allowed is not None:
            log_probs = jnp.where(allowed, log_probs, DEAD)
        log_prob, parent, token = _best(state.log_prob[:, :, None] + log_probs, W)
        log_prob = jnp.where(broken[:, None], jnp.nan, log_prob)
        return _extend(state, cache, log_prob, parent, token, limit, penalty, grows, eos_id)

    state = lax.while_loop(go_on, advance, state)
    assert state.ids.shape == (B, W, max_len)
    return _collect(state, penalty)


def greedy_search(
    step_fn: StepFunction,
    cache: Any,
    first_token: jax.Array,
    *,
    max_len: int,
    limit: jax.Array,
    eos_id: int,
    length_penalty: float = 0.0,
    allowed: jax.Array | None = None,
) -> SearchResult:
    """The likeliest token at each step: beam search with one slot, which takes no sort."""
    return beam_search(
        step_fn,
        cache,
        first_token,
        beam_size=1,
        max_len=max_len,
        limit=limit,
        length_penalty=length_penalty,
        eos_id=eos_id,
        allowed=allowed,
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
    temperature: jax.Array | float = 1.0,
    allowed: jax.Array | None = None,
) -> SearchResult:
    """Draw one continuation of `first_token` for each sentence.

    Args:
        step_fn: as in beam_search, with W = 1.
        cache: whatever step_fn takes.
        first_token: int32 [B], not part of the result.
        max_len: T, the static size of the result.
        limit: int32 [B], tokens that each sentence may have, EOS included; max_len is a limit too.
        eos_id: the token that ends a hypothesis.
        seed: int32 [B]; what a sentence draws follows from its own seed alone.
        temperature: logits are divided by it; 0: the likeliest token.
        allowed: bool [V], tokens that may be drawn; None: all.

    Returns:
        SearchResult of one hypothesis; log_prob is that of the model, without temperature.
    """
    B = first_token.shape[0]
    limit = jnp.minimum(limit, max_len)
    keys = jax.vmap(jax.random.key)(jnp.asarray(seed, jnp.uint32))

    def go_on(state: tuple) -> jax.Array:
        return state[-1].any()

    def advance(state: tuple) -> tuple:
        time, cache, token, ids, log_prob, ended, active = state
        logits, cache = step_fn(token[:, None], None, cache)
        log_probs = jax.nn.log_softmax(logits[:, 0].astype(jnp.float32))
        choice = log_probs if allowed is None else jnp.where(allowed, log_probs, DEAD)
        noise = jax.vmap(
            lambda key: jax.random.gumbel(jax.random.fold_in(key, time), choice.shape[1:])
        )
        token = jnp.argmax(choice + temperature * noise(keys), -1).astype(jnp.int32)
        gain = jnp.take_along_axis(log_probs, token[:, None], 1)[:, 0]
        ids = ids.at[:, time].set(jnp.where(active, token, 0))
        log_prob = jnp.where(active, log_prob + gain, log_prob)
        ended |= active & (token == eos_id)
        active &= (token != eos_id) & (time + 1 < limit) & ~jnp.isnan(log_prob)
        return time + 1, cache, token, ids, log_prob, ended, active

    start = (
        jnp.zeros((), jnp.int32),
        cache,
        first_token.astype(jnp.int32),
        jnp.zeros((B, max_len), jnp.int32),
        jnp.zeros((B,), jnp.float32),
        jnp.zeros((B,), bool),
        limit > 0,
    )
    _, _, _, ids, log_prob, ended, _ = lax.while_loop(go_on, advance, start)
    log_prob = log_prob[:, None]
    return SearchResult(ids[:, None], log_prob, log_prob, ended[:, None])


def _start(
    cache: Any, first_token: jax.Array, limit: jax.Array, W: int, n: int, max_len: int
) -> _State:
    """Only slot 0 is live, or the first step would take the same token W times."""
    B = first_token.shape[0]
    empty = SearchResult(
        ids=jnp.zeros((B, n, max_len), jnp.int32),
        log_prob=jnp.full((B, n), DEAD),
        score=jnp.full((B, n), DEAD),
        finished=jnp.zeros((B, n), bool),
    )
    return _State(
        time=jnp.zeros((), jnp.int32),
        cache=cache,
        token=jnp.broadcast_to(first_token[:, None], (B, W)).astype(jnp.int32),
        parent=jnp.zeros((B, W), jnp.int32),
        ids=jnp.zeros((B, W, max_len), jnp.int32),
        log_prob=jnp.full((B, W), DEAD).at[:, 0].set(0.0),
        length=jnp.zeros((B,), jnp.int32),
        active=limit > 0,
        done=empty,
    )


def _best(total: jax.Array, W: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The W best of [B, W', V]: log_prob, parent slot and token, [B, W] each, best first.

    The maxima of blocks are found first; the W best values lie in the W blocks with the best
    maxima. A full sort of the vocabulary is never made.
    """
    B, slots, V = total.shape
    flat = total.reshape(B, slots * V)
    if W == 1:
        index = flat.argmax(-1, keepdims=True)
        return jnp.take_along_axis(flat, index, 1), index // V, (index % V).astype(jnp.int32)
    width = 64
    if slots * V < 4 * W * width:
        value, index = lax.top_k(flat, W)
        return value, index // V, index % V
    pad = -(slots * V) % width
    blocks = jnp.pad(flat, ((0, 0), (0, pad)), constant_values=-jnp.inf).reshape(B, -1, width)
    _, block = lax.top_k(blocks.max(-1), W)
    block = jnp.sort(block, -1)  # equal values stay in the order of the vocabulary
    chosen = jnp.take_along_axis(blocks, block[:, :, None], 1).reshape(B, W * width)
    value, place = lax.top_k(chosen, W)
    index = jnp.take_along_axis(block, place // width, 1) * width + place % width
    return value, index // V, index % V


def _extend(
    state: _State,
    cache: Any,
    log_prob: jax.Array,
    parent: jax.Array,
    token: jax.Array,
    limit: jax.Array,
    penalty: Penalty,
    grows: bool,
    eos_id: int,
) -> _State:
    """Write the chosen tokens, move the ended ones to `done`, and see who goes on."""
    length = state.time + 1
    ids = jnp.take_along_axis(state.ids, parent[:, :, None], axis=1)
    ids = lax.dynamic_update_slice_in_dim(ids, token[:, :, None], state.time, 2)
    real = (log_prob > DEAD / 2) & state.active[:, None]
    ended = real & (token == eos_id)
    done = _merge(state.done, ids, log_prob, log_prob / penalty(length), ended)
    live = jnp.where((real & ~ended) | jnp.isnan(log_prob), log_prob, DEAD)

    # The best that a live hypothesis can still reach: penalties grow with alpha >= 0, so at the
    # sentence's own limit; they shrink with alpha < 0, so at the next length.
    final = limit if grows else jnp.minimum(length + 1, limit)
    reachable = live.max(-1) / penalty(final)
    can_win = (live.max(-1) > DEAD / 2) & (reachable > done.score[:, -1])
    active = state.active & can_win & (length < limit)
    # A sentence that has ended keeps the hypotheses it ended with.
    keep = state.active
    return _State(
        time=length,
        cache=cache,
        token=token,
        parent=parent,
        ids=jnp.where(keep[:, None, None], ids, state.ids),
        log_prob=jnp.where(keep[:, None], live, state.log_prob),
        length=jnp.where(keep, length, state.length),
        active=active,
        done=done,
    )


def _merge(
    done: SearchResult, ids: jax.Array, log_prob: jax.Array, score: jax.Array, new: jax.Array
) -> SearchResult:
    """The n best of the finished hypotheses and the `new` ones."""
    n = done.score.shape[1]
    everything = SearchResult(
        ids=jnp.concatenate([done.ids, ids], 1),
        log_prob=jnp.concatenate([done.log_prob, log_prob], 1),
        score=jnp.concatenate([done.score, jnp.where(new, score, DEAD)], 1),
        finished=jnp.concatenate([done.finished, new], 1),
    )
    _, order = lax.top_k(everything.score, n)
    return _take(everything, order)


def _take(result: SearchResult, order: jax.Array) -> SearchResult:
    return SearchResult(
        ids=jnp.take_along_axis(result.ids, order[:, :, None], 1),
        log_prob=jnp.take_along_axis(result.log_prob, order, 1),
        score=jnp.take_along_axis(result.score, order, 1),
        finished=jnp.take_along_axis(result.finished, order, 1),
    )


def _collect(state: _State, penalty: Penalty) -> SearchResult:
    """Finished hypotheses, then the live ones: unfinished, and so marked."""
    n = state.done.score.shape[1]
    score = state.log_prob / penalty(state.length)[:, None]
    broken = jnp.isnan(state.log_prob)
    live = broken | (state.log_prob > DEAD / 2)
    # NaN is never hidden; finished ones rank above any live one, then by score.
    rank = jnp.concatenate(
        [
            jnp.where(state.done.finished, 0, 2),
            jnp.where(broken, -1, jnp.where(live, 1, 2)),
        ],
        1,
    )
    everything = SearchResult(
        ids=jnp.concatenate([state.done.ids, state.ids], 1),
        log_prob=jnp.concatenate([state.done.log_prob, state.log_prob], 1),
        score=jnp.concatenate([state.done.score, jnp.where(live, score, DEAD)], 1),
        finished=jnp.concatenate([state.done.finished, jnp.zeros_like(live)], 1),
    )
    order = jnp.lexsort((-everything.score, rank), axis=-1)[:, :n]
    return _take(everything, order)
