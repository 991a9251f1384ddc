"""Sentence pairs of a run, whatever they come from: text files, TFDS or installed catalogues."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformer_jax.config import ConfigError, DataConfig, flag
from transformer_jax.data.files import Entry, entries
from transformer_jax.types import Pair


class Part(NamedTuple):
    """One source of a mixture."""

    name: str
    pairs: Any  # of Pair: has a length and can be gone through again and again
    langs: tuple[str, str]  # of source and target; they choose the tags, where there are any
    weight: float = 1.0  # its share of an epoch's examples, on any scale


class Corpus:
    """Training pairs: the parts of a mixture, one after the other. Never in memory as a whole.

    Args:
        parts: with at least one pair each.
        mixed: whether the weights count; otherwise each pair comes once an epoch.
    """

    def __init__(self, parts: Sequence[Part], mixed: bool = False) -> None:
        self.parts, self.mixed = tuple(parts), mixed

    def __len__(self) -> int:
        return sum(len(part.pairs) for part in self.parts)

    def __iter__(self) -> Iterator[Pair]:
        for part in self.parts:
            yield from part.pairs

    def fingerprint(self) -> str:
        """Hash of all pairs and languages, whatever the names and weights."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{len(part.pairs)} {part.langs} {_content(part.pairs)}\n".encode())
        return digest.hexdigest()


class Splits(NamedTuple):
    """What a run reads. Held-out parts have names; a run without any has empty dicts."""

    train: Corpus
    valid: Mapping[str, Sequence[Pair]]
    test: Mapping[str, Sequence[Pair]]


def load_splits(config: DataConfig, with_source: bool = True) -> Splits:
    """The three splits of the configured source.

    Args:
        config: which source, and its files or names.
        with_source: False: text for a language model, which files of the target side hold.

    Raises:
        ConfigError: a file is missing, or two sides do not belong together.
    """
    langs = config.source_lang, config.target_lang
    if config.source == "embedded":
        from transformer_jax.data.embedded import embedded_splits

        try:
            splits = embedded_splits(config.target_lang, cldr_train_pairs=config.cldr_train_pairs)
        except ValueError as error:
            raise ConfigError(f"--data.target-lang: {error}") from None
        return Splits(Corpus([Part("embedded", splits.train, langs)]), splits.valid, splits.test)
    if config.source == "tfds":
        from transformer_jax.data.prepared import tfds_splits

        train, valid, test = tfds_splits(config)
        return Splits(Corpus([Part(config.tfds_name, train, langs)]), valid, test)
    train = _text(config, "train", with_source)
    if not sum(len(entry.pairs) for entry in train):
        side = "train_source" if with_source else "train_target"
        files = getattr(config, side)
        got = f"no lines in {', '.join(files)}" if files else "no files"
        raise ConfigError(f"{flag(f'data.{side}')}: got {got}, allowed: one or more text files")
    held_out = []
    for name in ("valid", "test"):
        pairs = [pair for entry in _text(config, name, with_source) for pair in entry.pairs]
        held_out.append({name: pairs} if pairs else {})
    return Splits(_mixture(config, train), *held_out)


def _text(config: DataConfig, part: str, with_source: bool) -> list[Entry]:
    sources: tuple[str, ...] = getattr(config, f"{part}_source")
    targets: tuple[str, ...] = getattr(config, f"{part}_target")
    flags = flag(f"data.{part}_source"), flag(f"data.{part}_target")
    return entries(sources, targets, flags, with_source)


def _mixture(config: DataConfig, train: Sequence[Entry]) -> Corpus:
    """The entries with their weights and languages; those without lines have no share."""
    weights = config.train_weights or [
        max(1, len(entry.pairs)) ** (1 / config.train_temperature) for entry in train
    ]
    languages = config.train_target_langs or [config.target_lang] * len(train)
    for name, values in (("train_weights", weights), ("train_target_langs", languages)):
        if len(values) != len(train):
            raise ConfigError(
                f"{flag(f'data.{name}')}: got {len(values)} values, allowed: {len(train)}, "
                "one for each training file, pattern or table"
            )
    parts = [
        Part(entry.name, entry.pairs, (config.source_lang, lang), weight)
        for entry, lang, weight in zip(train, languages, weights, strict=True)
        if len(entry.pairs)
    ]
    return Corpus(parts, mixed=bool(config.train_weights) or config.train_temperature != 1)


def _content(pairs: Any) -> str:
    """What tells these pairs from others: a hash of their texts, unless they know a better way."""
    if hasattr(pairs, "fingerprint"):
        return pairs.fingerprint()
    digest = hashlib.sha256()
    for source, target in pairs:
        digest.update(f"{len(source)} {source} {len(target)} {target}".encode("utf-8", "replace"))
    return digest.hexdigest()
