"""Text encoded anew in every epoch: subword regularisation (Kudo, 2018) and BPE-dropout."""

from typing import NamedTuple

import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batching import Encoded
from transformer_jax.data.order import scatter
from transformer_jax.data.pieces import Sampled
from transformer_jax.data.sources import Corpus
from transformer_jax.data.store import Store
from transformer_jax.data.tokenizer import Tokenizer


class Sentences(NamedTuple):
    """The ids of one pair."""

    source: list[int]
    target: list[int]


class Resampled:
    """Segmentations that depend on (seed, epoch, example) alone.

    Args:
        store: with its texts.
        tokenizer: draws segmentations.
        corpus: of the same pairs, for their languages.
        config: the seed, and how much is sampled.
    """

    def __init__(self, store: Store, tokenizer: Tokenizer, corpus: Corpus, config: Config) -> None:
        assert store.texts is not None
        self._store, self._texts, self._tokenizer = store, store.texts, tokenizer
        self._langs = [part.langs for part in corpus.parts]
        self._ends = np.cumsum([len(part.pairs) for part in corpus.parts])
        self._seed, self._alpha = config.seed, config.data.subword_sampling

    def draw(self, epoch: int, pairs: np.ndarray, longest: tuple[int, int]) -> list[Sentences]:
        """Ids of some pairs in an epoch. Where they come out too long, those of the
        likeliest segmentation, which are not: nothing is dropped or cut.

        Args:
            epoch: counted from 0.
            pairs: int64 [n], their numbers in the store.
            longest: tokens of source and target that a batch can hold.
        """
        key = scatter(np.uint64(self._seed) + scatter(np.full(1, epoch, np.uint64)))
        source, target = (
            scatter(key + pairs.astype(np.uint64) * np.uint64(2) + np.uint64(side)) >> np.uint64(33)
            for side in (0, 1)
        )
        part = np.searchsorted(self._ends, pairs, side="right")
        drawn: list[Sentences | None] = [None] * len(pairs)
        for number in np.unique(part):
            mine, langs = np.flatnonzero(part == number), self._langs[number]
            sampled = [Sampled(self._alpha, seeds[mine].tolist()) for seeds in (source, target)]
            texts = [side.take(pairs[mine]) for side in self._texts]
            sides = (
                self._tokenizer.encode_source(texts[0], langs[0], langs[1], sampled[0]),
                self._tokenizer.encode_target(texts[1], langs[1], sampled[1]),
            )
            for i, src, tgt in zip(mine.tolist(), *sides, strict=True):
                fits = len(src) <= longest[0] and len(tgt) <= longest[1]
                drawn[i] = Sentences(src, tgt) if fits else self._likeliest(int(pairs[i]))
        return [sentences for sentences in drawn if sentences]

    def _likeliest(self, pair: int) -> Sentences:
        e = self._store.encoded
        return Sentences(
            e.src_ids[e.src_ends[pair] : e.src_ends[pair + 1]].tolist(),
            e.tgt_ids[e.tgt_ends[pair] : e.tgt_ends[pair + 1]].tolist(),
        )


def as_encoded(sentences: list[Sentences], start: int) -> Encoded:
    """Some pairs, side by side; `start` is what the decoder's input begins with."""
    arrays = []
    for side in (0, 1):
        ids = [pair[side] for pair in sentences]
        arrays.append(np.array([i for sentence in ids for i in sentence], np.int32))
        arrays.append(np.cumsum([0, *map(len, ids)]))
    return Encoded(arrays[0], arrays[1], arrays[2], arrays[3], start)
