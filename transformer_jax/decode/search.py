"""Beam search (section 6.1): a pure algorithm over a step function; no model in sight.

The rule, exactly. Each step takes the W best of all W * V continuations. Those that end in EOS are
finished and leave their slots empty. A sentence ends when no slot is live, or when no live
hypothesis can still beat the finished ones that were asked for. With W = 1 this is greedy search.

Other toolkits look at 2W continuations, so that W live ones always go on; `rule` names them:

exact         as above
authors       tensor2tensor: of the 2W best all that end in EOS are finished, the W best others go
              on; the sentence ends as above
ctranslate2   only those among the W best are finished when they end in EOS; the sentence ends when
              W are finished, or with alpha 0 when the best continuation of a step ends in EOS
transformers  candidates as ctranslate2; the sentence ends when W are finished and the best live
              hypothesis, were it to end now, would not beat the worst of them (early_stopping
              False; for True its rule is that of ctranslate2 with another alpha than 0)
"""

import dataclasses
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


class BeamState(NamedTuple):
    """A search under way. Every leaf but `time`, and what the cache says of itself, has B first."""

    time: jax.Array  # int32 []: tokens chosen so far
    cache: Any
    token: jax.Array  # int32 [B, W], the last token of each live hypothesis
    parent: jax.Array  # int32 [B, W], the slot it continues
    ids: jax.Array  # int32 [B, W, T]
    log_prob: jax.Array  # float32 [B, W], DEAD in an empty slot
    length: jax.Array  # int32 [B], tokens of the live hypotheses
    limit: jax.Array  # int32 [B], tokens that the sentence may have, prefix and EOS included
    offset: jax.Array  # int32 [B], tokens of a forced prefix that stand before these
    seed: jax.Array  # int32 [B], what sampling draws from
    active: jax.Array  # bool [B]: the sentence still goes on
    ended: jax.Array  # int32 [B]: hypotheses that have finished so far
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


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """A search in three parts: start, advance as often as wanted, finish.

    Attributes:
        beam_size: W.
        eos_id: the token that ends a hypothesis.
        length_penalty: alpha.
        length_penalty_form: form of length_penalty().
        num_hypotheses: n, how many are wanted and searched for exactly; 0: W.
        min_length: tokens that a hypothesis has at least before EOS.
        no_repeat_ngram: no sequence of so many tokens comes twice; 0: it may.
        rule: which continuations count, and when a sentence ends.
    """

    beam_size: int
    eos_id: int
    length_penalty: float = 0.0
    length_penalty_form: str = "paper"
    num_hypotheses: int = 0
    min_length: int = 0
    no_repeat_ngram: int = 0
    rule: str = "exact"

    def start(
        self,
        cache: Any,
        first_token: jax.Array,
        limit: jax.Array,
        max_len: int,
        offset: jax.Array | int = 0,
        log_prob: jax.Array | float = 0.0,
        seed: jax.Array | int = 0,
    ) -> BeamState:
        """Only slot 0 is live, or the first step would take the same token W times.

        Args:
            cache: whatever the step function takes.
            first_token: int32 [B], not part of the result.
            limit: int32 [B], tokens of each sentence, prefix and EOS included.
            max_len: T, the static size of the result.
            offset: int32 [B], tokens of a prefix that the cache holds already.
            log_prob: float32 [B], of that prefix.
            seed: int32 [B], for sampling.
        """
        B, W, n = first_token.shape[0], self.beam_size, self.num_hypotheses or self.beam_size
        if self.rule == "transformers":
            n = W  # the worst of W finished ones decides
        empty = SearchResult(
            ids=jnp.zeros((B, n, max_len), jnp.int32),
            log_prob=jnp.full((B, n), DEAD, jnp.float32),
            score=jnp.full((B, n), DEAD, jnp.float32),
            finished=jnp.zeros((B, n), bool),
        )
        return BeamState(
            time=jnp.zeros((), jnp.int32),
            cache=cache,
            token=jnp.broadcast_to(first_token[:, None], (B, W)).astype(jnp.int32),
            parent=jnp.zeros((B, W), jnp.int32),
            ids=jnp.zeros((B, W, max_len), jnp.int32),
            log_prob=jnp.full((B, W), DEAD, jnp.float32).at[:, 0].set(log_prob),
            length=jnp.broadcast_to(offset, (B,)).astype(jnp.int32),
            limit=jnp.asarray(limit, jnp.int32),
            offset=jnp.broadcast_to(offset, (B,)).astype(jnp.int32),
            seed=jnp.broadcast_to(seed, (B,)).astype(jnp.int32),
            active=jnp.asarray(limit) > offset,
            ended=jnp.zeros((B,), jnp.int32),
            done=empty,
        )

    def advance(
        self,
        step_fn: StepFunction,
        state: BeamState,
        until: jax.Array | int,
        allowed: jax.Array | None = None,
    ) -> BeamState:
        """Go on until every sentence has ended, or for `until` tokens in all.

        Args:
            step_fn: as in beam_search.
            state: as start or advance gave it.
            until: time at which to stop.
            allowed: bool [V], tokens that may be chosen; None: all.
        """

        def go_on(state: BeamState) -> jax.Array:
            return state.active.any() & (state.time < until)

        def step(state: BeamState) -> BeamState:
            parent = None if self.beam_size == 1 else state.parent
            logits, cache = step_fn(state.token, parent, state.cache)
            log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
            # One NaN among the logits makes NaN of all the log_probs of its slot.
            broken = (jnp.isnan(log_probs[:, :, 0]) & (state.log_prob > DEAD / 2)).any(1)
            log_probs = self.forbid(state, log_probs, allowed)
            count = self.beam_size * (1 if self.rule == "exact" else 2)
            total = state.log_prob[:, :, None] + log_probs
            log_prob, parent, token = _best(total, min(count, total[0].size))
            log_prob = jnp.where(broken[:, None], jnp.nan, log_prob)
            return self._extend(state._replace(cache=cache), log_prob, parent, token)

        return lax.while_loop(go_on, step, state)

    def finish(self, state: BeamState) -> SearchResult:
        """Finished hypotheses, then the live ones: unfinished, and so marked."""
        n = self.num_hypotheses or state.done.score.shape[1]
        score = state.log_prob / self._penalty(state.length)[:, None]
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
        return _take(everything, jnp.lexsort((-everything.score, rank), axis=-1)[:, :n])

    def _penalty(self, length: jax.Array) -> jax.Array:
        return length_penalty(length, self.length_penalty, self.length_penalty_form)

    def forbid(
        self, state: BeamState, log_probs: jax.Array, allowed: jax.Array | None
    ) -> jax.Array:
        """DEAD for tokens that may not come next; [B, W, V], not renormalised."""
        if allowed is not None:
            log_probs = jnp.where(allowed, log_probs, DEAD)
        if self.min_length:
            too_short = state.time + state.offset < self.min_length
            barred = jnp.where(too_short, DEAD, 0.0)[:, None]
            log_probs = log_probs.at[:, :, self.eos_id].add(barred)
        if self.no_repeat_ngram:
            log_probs = jnp.where(self._repeats(state, log_probs.shape[2]), DEAD, log_probs)
        return log_probs

    def _repeats(self, state: BeamState, V: int) -> jax.Array:
        """Tokens that would end an n-gram which the hypothesis already holds: bool [B, W, V]."""
        n, ids = self.no_repeat_ngram, state.ids
        B, W, T = ids.shape
        starts = jnp.arange(T)
        known = starts + n <= state.time  # n-grams that lie in the past as a whole
        same = jnp.broadcast_to(known, (B, W, T))
        for i in range(n - 1):
            recent = lax.dynamic_index_in_dim(ids, state.time - (n - 1) + i, 2)
            same &= jnp.roll(ids, -i, 2) == recent
        last = jnp.roll(ids, -(n - 1), 2)
        rows = jnp.arange(B)[:, None, None], jnp.arange(W)[None, :, None]
        return jnp.zeros((B, W, V), bool).at[(*rows, last)].max(same)

    def _extend(
        self, state: BeamState, log_prob: jax.Array, parent: jax.Array, token: jax.Array
    ) -> BeamState:
        """Write the chosen tokens, move the ended ones to `done`, and see who goes on.

        Args:
            state: with the cache of the step.
            log_prob: [B, C] of the C best continuations, best first.
            parent: [B, C].
            token: [B, C].
        """
        W, length = self.beam_size, state.time + 1 + state.offset
        ids = jnp.take_along_axis(state.ids, parent[:, :, None], axis=1)
        ids = lax.dynamic_update_slice_in_dim(ids, token[:, :, None], state.time, 2)
        real = (log_prob > DEAD / 2) & state.active[:, None]
        is_end = real & (token == self.eos_id)
        ended = is_end
        if self.rule in ("ctranslate2", "transformers"):
            ended &= jnp.arange(token.shape[1]) < W
        done = merge(state.done, ids, log_prob, log_prob / self._penalty(length)[:, None], ended)
        count = state.ended + ended.sum(1, dtype=jnp.int32)
        live = jnp.where((real & ~is_end) | jnp.isnan(log_prob), log_prob, DEAD)
        if self.rule != "exact":
            order = jnp.argsort(is_end, axis=1, stable=True)[:, :W]  # the W best that go on
            live, parent, token = (jnp.take_along_axis(x, order, 1) for x in (live, parent, token))
            ids = jnp.take_along_axis(ids, order[:, :, None], 1)
        active = state.active & self._goes_on(state, live, done, count, is_end[:, 0])
        # A sentence that has ended keeps the hypotheses it ended with.
        keep = state.active
        return state._replace(
            time=state.time + 1,
            token=token,
            parent=parent,
            ids=jnp.where(keep[:, None, None], ids, state.ids),
            log_prob=jnp.where(keep[:, None], live, state.log_prob),
            length=jnp.where(keep, length, state.length),
            active=active,
            ended=count,
            done=done,
        )

    def _goes_on(
        self,
        state: BeamState,
        live: jax.Array,
        done: SearchResult,
        count: jax.Array,
        best_ended: jax.Array,
    ) -> jax.Array:
        """Whether a sentence goes on after this step: bool [B]."""
        length = state.time + 1 + state.offset
        possible = (live.max(-1) > DEAD / 2) & (length < state.limit)
        if self.rule == "ctranslate2":
            enough = count >= self.beam_size
            if self.length_penalty == 0:
                enough |= best_ended & (count >= done.score.shape[1])
            return possible & ~enough
        if self.rule == "transformers":
            now = live.max(-1) / self._penalty(length)
            return possible & (now > done.score[:, -1])
        # The best that a live hypothesis can still reach: penalties grow with alpha >= 0, so at
        # the sentence's own limit; they shrink with alpha < 0, so at the next length.
        grows = self.length_penalty >= 0
        final = state.limit if grows else jnp.minimum(length + 1, state.limit)
        reachable = live.max(-1) / self._penalty(final)
        return possible & (reachable > done.score[:, -1])


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
    allowed: jax.Array | None = None,
    **options: Any,
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
        allowed: bool [V], tokens that may be chosen; None: all. Probabilities are not renormalised.
        **options: further attributes of BeamSearch.

    Returns:
        SearchResult. Where fewer than n hypotheses finished, live ones at the limit follow; where
        even these are fewer, empty ones of score DEAD. A sentence for which step_fn gives NaN
        ends at once, with a first hypothesis of log_prob NaN.
    """
    search = BeamSearch(beam_size, eos_id, length_penalty, **options)
    state = search.start(cache, first_token, jnp.minimum(limit, max_len), max_len)
    return search.finish(search.advance(step_fn, state, max_len, allowed))


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


def merge(
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
