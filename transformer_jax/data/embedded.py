"""The built-in corpus: the catalogues and the CLDR tables together, cut into train, valid, test.

Which part a pair belongs to is read off its English sentence alone, so no sentence can be learnt
in training and asked in a test, whatever is added to the corpus later.
"""

import hashlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from transformer_jax.types import Pair

logger = logging.getLogger(__name__)

HELD_OUT_PERCENT = 5
"""Share of all English sentences that goes to valid, and as many to test."""

CLDR_HELD_OUT_PAIRS = 500
"""Size of each held-out part from the CLDR tables; the catalogues' parts come out alike."""

CLDR_HELD_OUT_SEED = 0

Split = Literal["train", "valid", "test"]


class EmbeddedSplits(NamedTuple):
    """Training pairs in one list; held-out pairs apart by source: "catalogues" and "cldr"."""

    train: list[Pair]
    valid: dict[str, list[Pair]]
    test: dict[str, list[Pair]]


def embedded_splits(target_lang: str, *, cldr_train_pairs: int, seed: int = 0) -> EmbeddedSplits:
    """Returns the built-in corpus for English into `target_lang`.

    `train` holds every catalogue pair that is not held out, then `cldr_train_pairs` generated
    ones, which `seed` chooses. The held-out sets depend on neither number, so that scores of
    different runs can be compared; they have one translation for each English sentence.
    """
    # Imported late: the packages behind them are needed by no other source of data.
    from transformer_jax.data.catalogues import catalogue_pairs
    from transformer_jax.data.cldr import cldr_stream

    catalogues = catalogue_pairs(target_lang)

    def held_out(split: Split, generated: Iterable[Pair]) -> dict[str, list[Pair]]:
        return {
            "catalogues": _first_translations(_only(split, catalogues)),
            "cldr": list(itertools.islice(_only(split, generated), CLDR_HELD_OUT_PAIRS)),
        }

    generated = _only("train", cldr_stream(target_lang, seed))
    for_valid, for_test = itertools.tee(cldr_stream(target_lang, CLDR_HELD_OUT_SEED))
    splits = EmbeddedSplits(
        train=[*_only("train", catalogues), *itertools.islice(generated, cldr_train_pairs)],
        valid=held_out("valid", for_valid),
        test=held_out("test", for_test),
    )
    logger.info("embedded %s: %s", target_lang, _sizes(splits))
    return splits


def split_of(english: str) -> Split:
    """Returns the part of the corpus to which an English sentence belongs, on any machine."""
    digest = hashlib.sha256(_normalised(english).encode("utf-8")).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    if percent < HELD_OUT_PERCENT:
        return "test"
    return "valid" if percent < 2 * HELD_OUT_PERCENT else "train"


def _normalised(english: str) -> str:
    """Without case, spacing and punctuation: "Given name:" is the same sentence as "Given Name"."""
    return " ".join(re.findall(r"\w+", english.casefold()))


def _only(split: Split, pairs: Iterable[Pair]) -> Iterator[Pair]:
    return (pair for pair in pairs if split_of(pair.source) == split)


def _first_translations(pairs: Iterable[Pair]) -> list[Pair]:
    """Drops pairs whose English came before: programs translate some phrases differently."""
    first: dict[str, Pair] = {}
    for pair in pairs:
        first.setdefault(_normalised(pair.source), pair)
    return list(first.values())


def _sizes(splits: EmbeddedSplits) -> dict[str, int]:
    sizes = {"train": len(splits.train)}
    for split, parts in (("valid", splits.valid), ("test", splits.test)):
        sizes |= {f"{split}/{part}": len(pairs) for part, pairs in parts.items()}
    return sizes
