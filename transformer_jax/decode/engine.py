"""Model and parameters bound to a search: requests of any number and length in, results out.

Requests are sorted by length and cut into batches of a few fixed shapes, so that the number of
compiled programs is bounded by the lists below and not by the lengths that arrive. A batch is
decoded a few steps at a time. In between, sentences that have ended leave the batch, which then
goes on in a smaller shape, and the cache grows when it is full: no step pays for tokens that will
not come or for sentences that are done.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import ConfigError
from transformer_jax.data.tokenizer import OURS, SpecialIds
from transformer_jax.decode.sampling import Sampling
from transformer_jax.decode.search import DEAD, BeamSearch, BeamState, SearchResult, StepFunction
from transformer_jax.model import Model
from transformer_jax.runtime import maps_run_out
from transformer_jax.sharding import batch_sharding, batch_shards

# Lengths that a source or a prompt is padded to; longer ones go up in steps of the last.
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Tokens that the cache of a running batch has places for; it grows from one to the next.
TIMES = (16, 32, 64, 128, 256, 512)
# Rows of a batch.
ROWS = (1, 8, 16, 32, 48, 64, 96, 128)
# Steps between two looks at who has ended. On a CPU a look costs nothing; elsewhere it makes the
# device wait. Where none can leave, only a signal would be answered sooner.
CPU_STEPS, STEPS, UNDISTURBED_STEPS = 2, 8, 32
# A job of fewer sentences than this keeps its rows: compiling for fewer would cost more.
COMPACT_FROM = 256

Searching = BeamSearch | Sampling


class Hypothesis(NamedTuple):
    """One result, on the host."""

    ids: list[int]  # prefix and EOS included
    log_prob: float
    score: float
    finished: bool


class Request(NamedTuple):
    """One sentence to decode."""

    source: Sequence[int]  # EOS last; empty for a decoder-only model
    limit: int  # tokens that the target may have, prefix and EOS included
    prefix: Sequence[int] = ()  # what the target begins with, or a prompt
    seed: int = 0


def rung(size: int, ladder: Sequence[int]) -> int:
    """The first step of a ladder that holds `size`; beyond its end, multiples of the last step."""
    for step in ladder:
        if size <= step:
            return step
    return -(-size // ladder[-1]) * ladder[-1]


class Engine:
    """Decodes and scores with one model, or with several that vote.

    Args:
        models: each with its parameters, on any devices. Several are an ensemble: the mean of
            their probabilities counts.
        vocab_size: ids that may be chosen; rows of the table beyond the tokenizer never are.
        mesh: devices that share the rows of a batch; None: wherever the parameters are.
        special: the tokenizer's ids that are no text; with byte fallback nothing is unknown.
        forced: how many tokens every target begins with that are no choice of the model, such as
            a language tag: their log-probability counts as 0.

    Raises:
        ConfigError: a table has fewer rows than the tokenizer has pieces.
    """

    def __init__(
        self,
        models: Sequence[tuple[Model, Any]],
        vocab_size: int,
        mesh: Mesh | None = None,
        special: SpecialIds = OURS,
        forced: int = 0,
    ) -> None:
        self._models = tuple(model for model, _ in models)
        self._params = tuple(params for _, params in models)
        self._mesh = mesh
        self._programs = 0  # in memory at the last look
        widths = {model.config.vocab_size for model in self._models}
        if len(widths) > 1 or min(widths) < vocab_size:
            raise ConfigError(
                f"--model.vocab-size: got {', '.join(map(str, sorted(widths)))}, "
                f"allowed: at least {vocab_size}, the pieces of the tokenizer, and alike"
            )
        self.special, self.forced = special, forced
        self._allowed = np.arange(min(widths)) < vocab_size
        self._allowed[list(special.forbidden)] = False
        learned = [m.config for m in self._models if m.config.positions == "learned"]
        self._longest = min((c.max_positions - c.position_offset for c in learned), default=None)

    def decode(
        self, search: Searching, requests: Sequence[Request], batch_tokens: int
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each request, best first, in the order of the requests.

        Args:
            search: how.
            requests: any number, of any length.
            batch_tokens: source (or prompt) slots of one batch.
        """
        lengths = [max(len(r.source), 1 + len(r.prefix)) for r in requests]
        order = sorted(range(len(requests)), key=lambda i: (lengths[i], requests[i].limit))
        results: list[list[Hypothesis]] = [[] for _ in requests]
        compact = len(requests) >= COMPACT_FROM
        while order:
            width = rung(lengths[order[0]], LENGTHS)
            most = max(r for r in ROWS if r == 1 or r * width <= batch_tokens)
            group = [i for i in order[:most] if lengths[i] <= width]
            order = order[len(group) :]
            self._drop_programs()
            batch = _Batch(self, search, [requests[i] for i in group], compact)
            for i, hypotheses in zip(group, batch.run(), strict=True):
                results[i] = hypotheses
        return results

    def score(
        self,
        sources: Sequence[Sequence[int]] | None,
        targets: Sequence[Sequence[int]],
        batch_tokens: int,
    ) -> list[np.ndarray]:
        """Log-probability of each given target token (EOS last), by one forward pass.

        Sources are None for a decoder-only model.
        """
        given = [()] * len(targets) if sources is None else sources
        widths = [
            self.within(rung(max(len(s), len(t)), LENGTHS))
            for s, t in zip(given, targets, strict=True)
        ]
        order = sorted(range(len(targets)), key=lambda i: widths[i])
        results: list[np.ndarray] = [np.zeros(0)] * len(targets)
        while order:
            width = widths[order[0]]
            most = max(r for r in ROWS if r == 1 or r * width <= batch_tokens)
            group = [i for i in order[:most] if widths[i] <= width]
            order = order[len(group) :]
            self._drop_programs()
            rows = self.rows(len(group))
            src_ids = padded([given[i] for i in group], rows, width, self.special.pad)
            tgt_ids = padded([targets[i] for i in group], rows, width, self.special.pad)
            arrays = self.put((None if sources is None else src_ids, tgt_ids))
            static = {"models": self._models, "special": self.special, "forced": self.forced}
            found = np.asarray(_score(self._params, *arrays, **static))
            for row, i in enumerate(group):
                results[i] = found[row, : len(targets[i])]
                _require_finite(results[i])
        return results

    def start(self, search: Searching, arrays: Any, places: int) -> BeamState:
        """A search at its beginning, with places in the cache for so many tokens."""
        prompt = arrays[1].shape[1]
        places = self.within(places + prompt) - prompt
        static = {"models": self._models, "special": self.special, "forced": self.forced}
        return _start(self._params, *arrays, **static, search=search, places=places)

    def advance(self, search: Searching, state: BeamState, until: int) -> BeamState:
        """Some steps further; `state` is used up."""
        until_array = np.int32(until)
        return _advance(
            self._params, state, until_array, self._allowed, models=self._models, search=search
        )

    def within(self, length: int) -> int:
        """A length no longer than the positions that the models have learned."""
        return length if self._longest is None else min(length, self._longest)

    def rows(self, count: int) -> int:
        """Rows of a batch for so many sentences: a multiple of the devices that share it."""
        shards = 1 if self._mesh is None else batch_shards(self._mesh)
        return -(-rung(count, ROWS) // shards) * shards

    def _drop_programs(self) -> None:
        """Before there are too many, as when a server's callers choose options freely; those that
        are wanted again come back from disk."""
        count = lambda: sum(program._cache_size() for program in _PROGRAMS)
        # Counting maps takes milliseconds where there are many: only after something was compiled.
        if count() != self._programs and maps_run_out():
            for program in _PROGRAMS:
                program.clear_cache()
        self._programs = count()

    def put(self, arrays: Any) -> Any:
        """Host arrays, rows first, on the devices."""
        return arrays if self._mesh is None else jax.device_put(arrays, batch_sharding(self._mesh))


class _Batch:
    """Requests that are decoded together."""

    def __init__(
        self, engine: Engine, search: Searching, requests: Sequence[Request], compact: bool
    ) -> None:
        self._engine, self._search, self._requests = engine, search, requests
        self._compact = compact
        self._results: list[list[Hypothesis]] = [[] for _ in requests]
        # Which request each row belongs to; -1: a filler.
        self._owner = np.full(engine.rows(len(requests)), -1)
        self._owner[: len(requests)] = np.arange(len(requests))

    def run(self) -> list[list[Hypothesis]]:
        """Decode until every sentence has ended."""
        most = max(r.limit - len(r.prefix) for r in self._requests)
        places = min(TIMES[0], rung(most, TIMES))
        steps = CPU_STEPS if jax.default_backend() == "cpu" else STEPS
        state = self._engine.start(self._search, self._arrays(), places)
        time = 0
        while True:
            places = state.ids.shape[2]
            may_leave = self._compact and self._engine.rows(1) < len(self._owner)
            time = min(time + (steps if may_leave else UNDISTURBED_STEPS), places)
            state = self._engine.advance(self._search, state, time)
            active = np.asarray(state.active)
            if not active.any():
                break
            if self._compact:
                state = self._leave(state, active)
            if time == places:
                state = _grow(state, places=rung(places + 1, TIMES))
        self._collect(state, np.ones_like(active))
        return self._results

    def _arrays(self) -> Any:
        """Source ids, prompt, its length, limit and seed of each row."""
        requests, rows = self._requests, len(self._owner)
        sources = [r.source for r in requests]
        pad, start = self._engine.special.pad, self._engine.special.start
        prompts = [[start, *r.prefix] for r in requests]
        longest = max(map(len, sources))
        src_ids = None
        if longest:
            src_ids = padded(sources, rows, self._engine.within(rung(longest, LENGTHS)), pad)
        width = max(map(len, prompts))
        if width > 1:
            width = self._engine.within(rung(width, LENGTHS))
        fill = lambda values, filler: np.pad(
            np.asarray(values, np.int32), (0, rows - len(requests)), constant_values=filler
        )
        prompt = padded(prompts, rows, width, pad)
        prompt[len(requests) :, 0] = start
        return self._engine.put(
            (
                src_ids,
                prompt,
                fill([len(p) for p in prompts], 1),
                fill([r.limit for r in requests], 0),
                fill([r.seed % 2**31 for r in requests], 0),
            )
        )

    def _leave(self, state: BeamState, active: np.ndarray) -> BeamState:
        """Go on with fewer rows, if those that are active fit into the next smaller shape."""
        rows = self._engine.rows(int(active.sum()))
        if rows >= len(active):
            return state
        self._collect(state, ~active)
        kept = np.concatenate([np.flatnonzero(active), np.flatnonzero(~active)])[:rows]
        self._owner = np.where(active, self._owner, -1)[kept]
        return _take_rows(state, kept)

    def _collect(self, state: BeamState, wanted: np.ndarray) -> None:
        """Note the hypotheses of some rows."""
        # Without the cache, which plays no part: one program for many of its shapes.
        found = jax.device_get(_finish(state._replace(cache=()), search=self._search))
        reached = np.asarray(state.length - state.offset)
        for row in np.flatnonzero(wanted & (self._owner >= 0)):
            request = int(self._owner[row])
            prefix, eos = self._requests[request].prefix, self._engine.special.eos
            hypotheses = _hypotheses(found, int(row), int(reached[row]), prefix, eos)
            self._results[request] = hypotheses


def padded(sequences: Sequence[Sequence[int]], rows: int, width: int, pad: int = 0) -> np.ndarray:
    """Ids as int32 [rows, width], `pad` elsewhere."""
    array = np.full((rows, width), pad, np.int32)
    for row, ids in zip(array, sequences, strict=False):
        row[: len(ids)] = ids
    return array


def _mean(logits: Sequence[jax.Array]) -> jax.Array:
    """Of several models the logarithm of the mean probability; of one its logits."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - np.log(len(logits))


def _step_of(models: tuple[Model, ...], params: tuple[Any, ...]) -> StepFunction:
    def step(token: jax.Array, parent: jax.Array | None, caches: Any) -> tuple[jax.Array, Any]:
        stepped = [
            model.decode_step(p, token, parent, cache)
            for model, p, cache in zip(models, params, caches, strict=True)
        ]
        return _mean([logits for logits, _ in stepped]), tuple(cache for _, cache in stepped)

    return step


@functools.partial(jax.jit, static_argnames=("models", "special", "forced", "search", "places"))
def _start(
    params: tuple[Any, ...],
    src_ids: jax.Array | None,
    prompt: jax.Array,
    prompt_length: jax.Array,
    limit: jax.Array,
    seed: jax.Array,
    *,
    models: tuple[Model, ...],
    special: SpecialIds,
    forced: int,
    search: Searching,
    places: int,
) -> BeamState:
    """Encode src_ids [B, S], take all of the prompt [B, P] but its last token in one pass."""
    B, P = prompt.shape
    W = search.beam_size
    last = jnp.take_along_axis(prompt, prompt_length[:, None] - 1, 1)[:, 0]
    caches, prefix_logits = [], []
    for model, p in zip(models, params, strict=True):
        memory = src_mask = None
        if src_ids is not None:
            src_mask = src_ids != special.pad
            memory = model.encode(p, src_ids, src_mask)
        room = places if P == 1 else P + places
        cache = model.init_cache(p, memory, src_mask, room, W, batch_size=B)
        if P > 1:
            before = jnp.arange(P) < prompt_length[:, None] - 1
            logits, cache = model.prefill(p, prompt, cache, before)
            prefix_logits.append(logits)
        caches.append(cache)
    log_prob: Any = 0.0
    if P > 1:
        log_probs = jax.nn.log_softmax(_mean(prefix_logits)[:, :-1])
        chosen = jnp.take_along_axis(log_probs, prompt[:, 1:, None], 2)[:, :, 0]
        places_of = jnp.arange(1, P)
        counts = (places_of > forced) & (places_of < prompt_length[:, None])
        log_prob = jnp.where(counts, chosen, 0.0).sum(1)
    offset = prompt_length - 1
    given = {"offset": offset, "log_prob": log_prob, "seed": seed}
    return search.start(tuple(caches), last, limit, places, **given)


@functools.partial(jax.jit, static_argnames=("models", "search"), donate_argnums=1)
def _advance(
    params: tuple[Any, ...],
    state: BeamState,
    until: jax.Array,
    allowed: jax.Array,
    *,
    models: tuple[Model, ...],
    search: Searching,
) -> BeamState:
    return search.advance(_step_of(models, params), state, until, allowed)


@functools.partial(jax.jit, static_argnames="search")
def _finish(state: BeamState, *, search: Searching) -> SearchResult:
    return search.finish(state)


@functools.partial(jax.jit, static_argnames="places")
def _grow(state: BeamState, *, places: int) -> BeamState:
    """The same search with places for more tokens."""
    more = places - state.ids.shape[2]
    wider = lambda ids: jnp.pad(ids, ((0, 0), (0, 0), (0, more)))
    return state._replace(
        cache=tuple(cache.grown(more) for cache in state.cache),
        ids=wider(state.ids),
        done=state.done._replace(ids=wider(state.done.ids)),
    )


@jax.jit
def _take_rows(state: BeamState, rows: jax.Array) -> BeamState:
    """Some rows of a search; what has no rows stays."""
    return jax.tree.map(lambda x: x[rows] if x.ndim else x, state)


@functools.partial(jax.jit, static_argnames=("models", "special", "forced"))
def _score(
    params: tuple[Any, ...],
    src_ids: jax.Array | None,
    tgt_ids: jax.Array,
    *,
    models: tuple[Model, ...],
    special: SpecialIds,
    forced: int,
) -> jax.Array:
    """Log-probability of every target id [B, T], 0 at padding and where it is forced."""
    start = jnp.full_like(tgt_ids[:, :1], special.start)
    tgt_in_ids = jnp.concatenate([start, tgt_ids[:, :-1]], 1)
    real = tgt_ids != special.pad
    src_segments = None if src_ids is None else (src_ids != special.pad).astype(jnp.int32)
    segments = (src_segments, real.astype(jnp.int32))
    logits = [
        model.apply(p, src_ids, tgt_in_ids, *segments)
        for model, p in zip(models, params, strict=True)
    ]
    log_probs = jax.nn.log_softmax(_mean(logits))
    counts = real & (jnp.arange(tgt_ids.shape[1]) >= forced)
    return jnp.take_along_axis(log_probs, tgt_ids[:, :, None], 2)[:, :, 0] * counts


_PROGRAMS: tuple[Any, ...] = (_start, _advance, _finish, _grow, _take_rows, _score)


def _hypotheses(
    found: SearchResult, row: int, reached: int, prefix: Sequence[int], eos: int
) -> list[Hypothesis]:
    """Those of one row; `reached`: tokens of the unfinished ones."""
    result = []
    for ids, log_prob, score, finished in zip(*(x[row] for x in found), strict=True):
        _require_finite(log_prob)
        if score < DEAD / 10:  # fewer hypotheses exist than were asked for
            continue
        length = int(np.flatnonzero(ids == eos)[0]) + 1 if finished else reached
        kept = [*prefix, *(int(i) for i in ids[:length])]
        result.append(Hypothesis(kept, float(log_prob), float(score), bool(finished)))
    return result


def _require_finite(log_prob: np.ndarray) -> None:
    if not np.isfinite(log_prob).all():
        raise FloatingPointError("the model gave NaN: its parameters are not finite")
