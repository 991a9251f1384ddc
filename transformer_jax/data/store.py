"""Encoded pairs on disk: each text is encoded once, by the hash of all that its ids depend on.

Flat arrays of ids, and where each sentence ends, are mapped into memory, so that the operating
system keeps what is in use and a process holds nothing of the size of the corpus. (ArrayRecord,
with a record for each pair, would be read one pair at a time by Python; slices of a flat array
are read by NumPy, a whole batch at a time.)
"""

import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.data.batching import Encoded
from transformer_jax.data.filters import hash_pairs
from transformer_jax.data.sources import Corpus
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Pair

logger = logging.getLogger(__name__)
_FORMAT = 1  # of the files; part of the hash
_CHUNK = 10_000
_TYPES = {
    "src_ends": "int64",
    "tgt_ends": "int64",
    "identical": "bool",
    "hashes": "uint64",
    "src_text_ends": "int64",
    "tgt_text_ends": "int64",
    "src_text": "uint8",
    "tgt_text": "uint8",
}  # of the files besides src_ids and tgt_ids, which have the least that holds the vocabulary


class Texts(NamedTuple):
    """Sentences of one side as UTF-8, at random."""

    flat: np.ndarray  # uint8 [bytes]
    ends: np.ndarray  # int64 [sentences + 1]

    def take(self, numbers: np.ndarray) -> list[str]:
        """The sentences of these numbers."""
        spans = zip(self.ends[numbers].tolist(), self.ends[numbers + 1].tolist(), strict=True)
        return [self.flat[a:b].tobytes().decode("utf-8", "surrogatepass") for a, b in spans]


class Store(NamedTuple):
    """A whole corpus, encoded."""

    encoded: Encoded
    identical: np.ndarray  # bool [pairs]: both sides have the same text
    hashes: np.ndarray  # uint64 [pairs], of the ids
    texts: tuple[Texts, Texts] | None  # where they are kept: to be encoded anew in each epoch


def encode_pairs(
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    with_source: bool = True,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> Encoded:
    """Ids of pairs that fit in memory, EOS last; without sources, as decoder-only models want it,
    of targets. The languages are those of the tags, where the tokenizer has any."""
    langs = source_lang, target_lang
    chunks = [_encode(chunk, tokenizer, with_source, langs) for chunk in _chunks(pairs, _CHUNK)]
    arrays = []
    for side in (0, 1):
        arrays.append(np.concatenate([np.zeros(0, np.int32), *(ids[side] for ids, _ in chunks)]))
        counts = [np.zeros(1, np.int64), *(counts[side] for _, counts in chunks)]
        arrays.append(np.cumsum(np.concatenate(counts)))
    return Encoded(arrays[0], arrays[1], arrays[2], arrays[3], tokenizer.start_id)


def open_store(
    corpus: Corpus, tokenizer: Tokenizer, with_source: bool, with_texts: bool, directory: str
) -> Store:
    """The encoded corpus: found in the cache, or written there.

    Args:
        corpus: the training pairs.
        tokenizer: gives the ids.
        with_source: False: text for a language model.
        with_texts: keep the text beside the ids.
        directory: of the cache; "": transformer_jax/encoded in the user's cache directory.

    Raises:
        ConfigError: the directory cannot be written.
    """
    known = [_FORMAT, tokenizer.fingerprint, with_source, with_texts, corpus.fingerprint()]
    key = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]
    root = Path(directory).expanduser() if directory else _user_cache()
    if not (root / key).is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            _write(root / key, corpus, tokenizer, with_source, with_texts)
        except OSError as error:
            raise ConfigError(
                f"--data.cache-dir: {root}: cannot be written: {error.strerror}; "
                "allowed: a directory with room for the encoded text"
            ) from None
    return _open(root / key, _type_of(tokenizer), tokenizer.start_id)


def _user_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "transformer_jax" / "encoded"


def _type_of(tokenizer: Tokenizer) -> str:
    largest = max(tokenizer.vocab_size, tokenizer.source_vocab_size)
    return "uint16" if largest <= 1 << 16 else "int32"


def _write(
    path: Path, corpus: Corpus, tokenizer: Tokenizer, with_source: bool, with_texts: bool
) -> None:
    """All files in a directory of their own, which gets its name when it is whole."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=path.parent))
    try:
        with _Writer(partial, _type_of(tokenizer)) as out:
            for part in corpus.parts:
                for chunk in _chunks(part.pairs, _CHUNK):
                    ids, counts = _encode(chunk, tokenizer, with_source, part.langs)
                    for side, prefix in enumerate(("src", "tgt")):
                        out.add(prefix, f"{prefix}_ids", ids[side], counts[side])
                        if with_texts:
                            texts = [p[side].encode("utf-8", "surrogatepass") for p in chunk]
                            flat = np.frombuffer(b"".join(texts), np.uint8)
                            name = f"{prefix}_text"
                            out.add(name, name, flat, np.array([len(t) for t in texts]))
                    out.append("identical", np.array([p.source == p.target for p in chunk]))
                    out.append("hashes", hash_pairs(ids, counts))
        partial.rename(path)
    except OSError:
        if not path.is_dir():  # otherwise another process was first, with the same content
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Writer:
    """Open files that grow array by array."""

    def __init__(self, directory: Path, ids_type: str) -> None:
        self._directory, self._ids_type = directory, ids_type
        self._files, self._totals = {}, {}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def append(self, name: str, array: np.ndarray) -> None:
        """Add to a file."""
        if name not in self._files:
            self._files[name] = open(self._directory / f"{name}.bin", "wb")  # noqa: SIM115
        kind = _TYPES.get(name, self._ids_type)
        self._files[name].write(np.ascontiguousarray(array, kind).data)

    def add(self, ends: str, name: str, flat: np.ndarray, counts: np.ndarray) -> None:
        """Add to a flat file, and to that of its ends."""
        if ends not in self._totals:
            self._totals[ends] = 0
            self.append(f"{ends}_ends", np.zeros(1))
        self.append(name, flat)
        self.append(f"{ends}_ends", self._totals[ends] + np.cumsum(counts))
        self._totals[ends] += int(np.sum(counts))


def _open(directory: Path, ids_type: str, start: int) -> Store:
    def array(name: str) -> np.ndarray:
        path, kind = directory / f"{name}.bin", _TYPES.get(name, ids_type)
        if not path.stat().st_size:  # cannot be mapped
            return np.zeros(0, kind)
        return np.asarray(np.memmap(path, kind, "r"))

    src = array("src_ids"), array("src_ends")
    encoded = Encoded(*src, array("tgt_ids"), array("tgt_ends"), start)
    texts = None
    if (directory / "src_text.bin").exists():
        source, target = (
            Texts(array(f"{side}_text"), array(f"{side}_text_ends")) for side in ("src", "tgt")
        )
        texts = source, target
    return Store(encoded, array("identical"), array("hashes"), texts)


def _encode(
    chunk: Sequence[Pair],
    tokenizer: Tokenizer,
    with_source: bool,
    langs: tuple[str | None, str | None],
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Flat ids int32 and lengths int64 of both sides."""
    sources = [pair.source for pair in chunk]
    sentences = (
        tokenizer.encode_source(sources, *langs) if with_source else [[]] * len(chunk),
        tokenizer.encode_target([pair.target for pair in chunk], langs[1]),
    )
    flat = [np.fromiter(itertools.chain.from_iterable(side), np.int32) for side in sentences]
    counts = [np.fromiter(map(len, side), np.int64, len(chunk)) for side in sentences]
    return (flat[0], flat[1]), (counts[0], counts[1])


def _chunks(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    remaining = iter(pairs)
    while chunk := list(itertools.islice(remaining, size)):
        yield chunk
