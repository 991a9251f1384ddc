"""The values that travel between the parts, and the legend of letters used in every shape.

Letters
    B batch rows          S source length      T target length      D model width (d_model)
    H heads               K width per head of query and key (d_k)   F feed-forward width (d_ff)
    V vocabulary          W beam slots         L layers             N = B * W
    Inside attention Q is the query length and M the length of what is attended to (memory).

All types are NamedTuples: JAX treats them as pytrees, and this file needs no jax.
`Array` stands for a NumPy array on the host side and a jax.Array inside compiled code.
"""

from typing import Any, NamedTuple

Array = Any


class Pair(NamedTuple):
    """One sentence and its translation."""

    source: str
    target: str


class Batch(NamedTuple):
    """One rectangular batch of token ids. Loss weights are `tgt_segments > 0`.

    Segment 0 marks padding. An unpacked row holds the one segment 1; a packed row holds
    segments 1, 2, ... one for each sentence pair, and positions that start anew in each.
    """

    src_ids: Array | None  # int32 [B, S]; None: text for a decoder-only model
    src_segments: Array | None  # int32 [B, S]
    tgt_in_ids: Array  # int32 [B, T]: start id, then the target shifted right by one
    tgt_out_ids: Array  # int32 [B, T]: the target, EOS last
    tgt_segments: Array  # int32 [B, T]
    src_positions: Array | None = None  # int32 [B, S]; None: 0, 1, 2, ... in each row
    tgt_positions: Array | None = None  # int32 [B, T]


class Metrics(NamedTuple):
    """Sums, never means: dividing once at the end, by the count, is exact."""

    loss: Array  # sum of the label-smoothed cross-entropy, float32 []
    nll: Array  # sum of the plain negative log-likelihood in nats, float32 []
    correct: Array  # teacher-forced argmax hits, float32 []
    tokens: Array  # number of real target tokens, float32 []
    grad_norm: Array  # global norm of the gradient, float32 []
    updates: Array  # steps summed here, float32 []


class Translation(NamedTuple):
    """One hypothesis for one source line."""

    text: str
    pieces: list[str]
    log_prob: float  # sum over target tokens, EOS included
    score: float  # log_prob divided by the length penalty
    finished: bool  # False: the length limit came before EOS
    truncated_source: bool = False
    attention: Any = None  # [T, S] on request


class SamplingOptions(NamedTuple):
    """How translations are drawn from the model's distribution."""

    temperature: float = 1.0  # logits are divided by it; 0: the likeliest token
    top_k: int = 0  # only the k likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that have this much probability together
    min_p: float = 0.0  # only tokens with at least this share of the likeliest one's probability
    seed: int = 0  # text i draws with seed + i, whatever it is batched with


class Score(NamedTuple):
    """Forced decoding of a given target."""

    log_prob: float  # sum over target tokens, EOS included
    token_log_probs: list[float]
    num_tokens: int
