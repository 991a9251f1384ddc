"""Model and parameters bound to search: requests of any number and length in, results in order out.

Requests are sorted by length and cut into batches of a few fixed shapes, so that the number of
compiled programs is bounded by the list of shapes and not by the lengths that arrive.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.data.tokenizer import EOS, PAD, START, UNK
from transformer_jax.decode.search import SearchResult, beam_search
from transformer_jax.model import Model

# Lengths that a source, EOS included, is padded to; longer ones go up in steps of the last.
SOURCE_LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Rows of a batch; a batch of a few requests does not pay for a full one.
ROWS = (1, 8, 32, 128)


class Hypothesis(NamedTuple):
    """One result, on the host."""

    ids: list[int]  # EOS included, if finished
    log_prob: float
    score: float
    finished: bool


def source_length(tokens: int) -> int:
    """The padded length of a source of so many tokens."""
    for length in SOURCE_LENGTHS:
        if tokens <= length:
            return length
    return -(-tokens // SOURCE_LENGTHS[-1]) * SOURCE_LENGTHS[-1]


class Engine:
    """Searches with one model.

    Args:
        model: the pure functions.
        params: its parameters, on any devices.
        vocab_size: ids that may be chosen; rows of the table beyond the tokenizer never are.

    Raises:
        ConfigError: the table has fewer rows than the tokenizer has pieces.
    """

    def __init__(self, model: Model, params: Any, vocab_size: int) -> None:
        if vocab_size > model.config.vocab_size:
            raise ConfigError(
                f"--model.vocab-size: got {model.config.vocab_size}, "
                f"allowed: at least {vocab_size}, the pieces of the tokenizer"
            )
        self._model, self.params = model, params
        # Special ids are no text, and with byte fallback nothing is unknown.
        allowed = np.arange(model.config.vocab_size) < vocab_size
        allowed[[PAD, UNK, START]] = False
        self.allowed = allowed
        learned = model.config.positions == "learned"
        self._longest = model.config.max_positions if learned else None

    def search(
        self,
        sources: Sequence[Sequence[int]],
        *,
        beam_size: int,
        length_penalty: float,
        length_penalty_form: str,
        max_extra_tokens: int,
        num_hypotheses: int,
        batch_tokens: int,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each source (ids, EOS last), in the order of the sources.

        A translation has at most max_extra_tokens more tokens than its source.
        """
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        results: list[list[Hypothesis]] = [[] for _ in sources]
        start = 0
        while start < len(order):
            longest = self._within(source_length(len(sources[order[start]])))
            most = max(r for r in ROWS if r == 1 or r * longest <= batch_tokens)
            group = [i for i in order[start : start + most] if len(sources[i]) <= longest]
            rows = min(r for r in ROWS if r >= len(group))
            src_ids = np.full((rows, longest), PAD, np.int32)
            limit = np.zeros(rows, np.int32)
            for row, i in enumerate(group):
                src_ids[row, : len(sources[i])] = sources[i]
                limit[row] = len(sources[i]) + max_extra_tokens
            found = jax.device_get(
                _translate(
                    self.params,
                    src_ids,
                    limit,
                    self.allowed,
                    model=self._model,
                    beam_size=beam_size,
                    length_penalty=length_penalty,
                    length_penalty_form=length_penalty_form,
                    max_len=self._within(longest + max_extra_tokens),
                    num_hypotheses=num_hypotheses,
                )
            )
            for row, i in enumerate(group):
                results[i] = _hypotheses(found, row)
            start += len(group)
        return results

    def _within(self, length: int) -> int:
        """A buffer no longer than the positions that the model has learned."""
        return length if self._longest is None else min(length, self._longest)

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
            self._within(source_length(max(len(s), len(t))))
            for s, t in zip(given, targets, strict=True)
        ]
        order = sorted(range(len(targets)), key=lambda i: widths[i])
        results: list[np.ndarray] = [np.zeros(0)] * len(targets)
        start = 0
        while start < len(order):
            width = widths[order[start]]
            most = max(r for r in ROWS if r == 1 or r * width <= batch_tokens)
            group = [i for i in order[start : start + most] if widths[i] <= width]
            rows = min(r for r in ROWS if r >= len(group))
            src_ids, tgt_ids = np.full((2, rows, width), PAD, np.int32)
            for row, i in enumerate(group):
                src_ids[row, : len(given[i])] = given[i]
                tgt_ids[row, : len(targets[i])] = targets[i]
            has_source = None if sources is None else src_ids
            found = np.asarray(_score(self.params, has_source, tgt_ids, model=self._model))
            for row, i in enumerate(group):
                results[i] = found[row, : len(targets[i])]
                _require_finite(results[i])
            start += len(group)
        return results


@functools.partial(
    jax.jit,
    static_argnames=(
        *("model", "beam_size", "length_penalty", "length_penalty_form"),
        *("max_len", "num_hypotheses"),
    ),
)
def _translate(
    params: Any,
    src_ids: jax.Array,
    limit: jax.Array,
    allowed: jax.Array,
    *,
    model: Model,
    beam_size: int,
    length_penalty: float,
    length_penalty_form: str,
    max_len: int,
    num_hypotheses: int,
) -> SearchResult:
    """Encode, then search, as one compiled program: src_ids [B, S], limit [B], allowed [V]."""
    src_mask = src_ids != PAD
    memory = model.encode(params, src_ids, src_mask)
    cache = model.init_cache(params, memory, src_mask, max_len, beam_size)
    return beam_search(
        functools.partial(model.decode_step, params),
        cache,
        jnp.full(src_ids.shape[:1], START, jnp.int32),
        beam_size=beam_size,
        max_len=max_len,
        limit=limit,
        length_penalty=length_penalty,
        length_penalty_form=length_penalty_form,
        eos_id=EOS,
        num_hypotheses=num_hypotheses,
        allowed=allowed,
    )


@functools.partial(jax.jit, static_argnames="model")
def _score(
    params: Any, src_ids: jax.Array | None, tgt_ids: jax.Array, *, model: Model
) -> jax.Array:
    """Log-probability of every target id [B, T], 0 at padding."""
    start = jnp.full_like(tgt_ids[:, :1], START)
    tgt_in_ids = jnp.concatenate([start, tgt_ids[:, :-1]], 1)
    real = tgt_ids != PAD
    src_segments = None if src_ids is None else (src_ids != PAD).astype(jnp.int32)
    logits = model.apply(params, src_ids, tgt_in_ids, src_segments, real.astype(jnp.int32))
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, tgt_ids[:, :, None], 2)[:, :, 0] * real


def _hypotheses(found: SearchResult, row: int) -> list[Hypothesis]:
    result = []
    for ids, log_prob, score, finished in zip(*(x[row] for x in found), strict=True):
        _require_finite(log_prob)
        if score < -1e29:  # fewer hypotheses exist than were asked for
            continue
        ends = np.flatnonzero(ids == EOS) if finished else np.flatnonzero(ids != PAD)
        length = int(ends[0 if finished else -1]) + 1 if len(ends) else 0
        kept = [int(i) for i in ids[:length]]
        result.append(Hypothesis(kept, float(log_prob), float(score), bool(finished)))
    return result


def _require_finite(log_prob: np.ndarray) -> None:
    if not np.isfinite(log_prob).all():
        raise FloatingPointError("the model gave NaN: its parameters are not finite")
