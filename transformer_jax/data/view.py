"""What the pipeline makes of a corpus, in words: python -m transformer_jax data."""

import itertools
from collections.abc import Iterator

import numpy as np

from transformer_jax.data.pipeline import TrainData
from transformer_jax.data.sources import Corpus
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Pair

_BINS = 12
_LOOK = 100_000  # pairs
_BAR = 40  # characters of the longest bar


def view(data: TrainData, corpus: Corpus, tokenizer: Tokenizer, show: int) -> Iterator[str]:
    """Lines: sources with their shares, counts by reason, lengths, batches, the first pairs.

    Args:
        data: from train_data.
        corpus: the pairs that it was made of.
        tokenizer: the one that encoded them.
        show: how many pairs to show as text, pieces and ids.
    """
    for part, count in zip(corpus.parts, data.order.counts, strict=True):
        yield f"source: {part.name}: {len(part.pairs)} pairs, {count} in an epoch"
    yield data.report
    for reason, count in data.dropped.items():
        yield f"dropped: {count} {reason}"
    yield from _histogram(data)
    for number, (place, pair) in enumerate(_first(data, corpus, show), 1):
        yield ""
        yield from _pair(number, place, pair, data, tokenizer)


def _histogram(data: TrainData) -> Iterator[str]:
    """Tokens of source and target, of pairs evenly spread over those that are kept."""
    count = min(len(data.kept), _LOOK)
    some = data.kept[np.arange(count) * len(data.kept) // count]
    lengths = data.encoded.lengths_of(some)
    width = -(-int(lengths.max()) // _BINS)
    bins = [np.bincount((side - 1).clip(0) // width, minlength=1) for side in lengths.T]
    last = max(map(len, bins))
    source, target = (np.pad(counts, (0, last - len(counts))) for counts in bins)
    most = max(source.max(), target.max())
    yield f"tokens, EOS included{'':8}source{'':{_BAR}} target"
    for i, (a, b) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        bars = (f"{count:>8} {'#' * -(-count * _BAR // most):{_BAR}}" for count in (a, b))
        yield f"{i * width + 1:>6} to {(i + 1) * width:<6} " + "".join(bars).rstrip()


def _first(data: TrainData, corpus: Corpus, show: int) -> Iterator[tuple[int, Pair]]:
    """The first pairs that are kept, with their numbers."""
    wanted = set(data.kept[:show].tolist())
    last = max(wanted, default=-1)
    for place, pair in enumerate(itertools.islice(corpus, last + 1)):
        if place in wanted:
            yield place, pair


def _pair(
    number: int, place: int, pair: Pair, data: TrainData, tokenizer: Tokenizer
) -> Iterator[str]:
    e = data.encoded
    sides = (
        ("source", pair.source, e.src_ids[e.src_ends[place] : e.src_ends[place + 1]]),
        ("target", pair.target, e.tgt_ids[e.tgt_ends[place] : e.tgt_ends[place + 1]]),
    )
    pieces = {"source": tokenizer.source, "target": tokenizer.target}
    for side, text, ids in sides:
        if len(ids):
            yield f"{number} {side}: {text}"
            yield f"{number} pieces: {' '.join(pieces[side].piece(i) for i in ids.tolist())}"
            yield f"{number} ids:    {' '.join(map(str, ids.tolist()))}"
