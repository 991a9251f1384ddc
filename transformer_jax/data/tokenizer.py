"""Text and token ids: SentencePiece, trained once and kept with the run."""

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import sentencepiece

from transformer_jax.config import ConfigError, TokenizerConfig
from transformer_jax.data.pieces import (
    EOS,
    OURS,
    PAD,
    START,
    UNK,
    Pieces,
    Sampled,
    SpecialIds,
    clean,
)

FORMAT_VERSION = 1
_DESCRIPTION = "tokenizer.json"


class Rows(Protocol):
    """Rows of texts that can be counted and read again and again."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Sequence[str]]: ...


class Tokenizer:
    """The pieces of both sides, and language tags.

    Ids: 0 pad, 1 EOS, 2 unknown, 3 the start of a target, or those of an imported model. These are
    control symbols: a literal "</s>" in a text is text. Language tags are ids too, put in front of
    the pieces.

    Args:
        source: pieces of the source side.
        target: pieces of the target side; the same object where both share one model.
        tags: the id of each language's tag.
        tag_place: where tags stand. "source": the source begins with the tag of the target
            language, and the model translates into it; a source text that begins with one of the
            tags, written >>deu<<, chooses its own. "both": the source begins with the tag of its
            own language, and the target with that of the target language.
        special: ids that are no text.
    """

    def __init__(
        self,
        source: Pieces,
        target: Pieces | None = None,
        tags: Mapping[str, int] | None = None,
        tag_place: Literal["source", "both"] = "source",
        special: SpecialIds = OURS,
    ) -> None:
        self.source, self.target = source, target or source
        self.tags, self.tag_place, self.special = dict(tags or {}), tag_place, special
        self.pad_id, self.eos_id, self.unk_id, self.start_id = special[:4]
        self._no_text = special.all | set(self.tags.values())

    @classmethod
    def new(
        cls, pairs: Rows, config: TokenizerConfig, target_langs: Iterable[str] = ()
    ) -> "Tokenizer":
        """The models that the config names, or new ones from sentence pairs; see train.

        Raises:
            ConfigError: a file is no SentencePiece model, or as train.
        """
        if not config.model:
            return cls.train(pairs, config, target_langs)
        langs = sorted(set(target_langs))
        source = _existing("model", config.model, langs)
        target = (
            _existing("target_model", config.target_model, langs) if config.target_model else None
        )
        return cls(source, target, {lang: source.number(_tag_piece(lang)) for lang in langs})

    @classmethod
    def train(
        cls, pairs: Rows, config: TokenizerConfig, target_langs: Iterable[str] = ()
    ) -> "Tokenizer":
        """Learn pieces from sentence pairs: from both sides, or from all texts of longer rows.

        Of more than sample_lines rows, as many are taken, evenly spread.

        Args:
            pairs: rows of texts.
            config: size and kind of the vocabulary.
            target_langs: each gets a tag, with which the source begins.

        Raises:
            ConfigError: the vocabulary size does not suit the text.
        """
        langs = sorted(set(target_langs))
        tags = [_tag_piece(lang) for lang in langs]
        if config.separate:
            sides = [
                _learn((row[side] for row in _spread(pairs, config.sample_lines)), config, tags)
                for side in (0, 1)
            ]
        else:
            rows = _spread(pairs, config.sample_lines)
            sides = [_learn((text for row in rows for text in row), config, tags)]
        source = sides[0]
        return cls(source, sides[-1], {lang: source.number(_tag_piece(lang)) for lang in langs})

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer that `save` wrote.

        Raises:
            ConfigError: a file is missing or says something else.
        """
        files = _read(directory)
        try:
            description = json.loads(files[_DESCRIPTION])
            version = description["format_version"]
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise ConfigError(
                    f"{directory / _DESCRIPTION}: format_version: got {version!r}, "
                    f"allowed: up to {FORMAT_VERSION}"
                )
            ids = dict(description.get("special", {}))
            for several in {"forbidden", "others"} & ids.keys():
                ids[several] = tuple(ids[several])
            special, tags = SpecialIds(**ids), description["tags"]
            never = special.all | set(tags.values())

            def side(name: str, numbering: str | None) -> Pieces:
                numbers = None if numbering is None else json.loads(files[numbering])
                return Pieces(files[name], numbers, special.unk, never)

            source, numbering = description["source"], description["numbering"]
            target, of_target = description["target"], description.get("target_numbering")
            pieces = side(source, numbering)
            if target != source or of_target:
                other = side(target, of_target or numbering)
            else:
                other = pieces
            return cls(pieces, other, tags, description["tag_place"], special)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{directory}: not a tokenizer of ours ({error!r})") from None

    def save(self, directory: Path) -> None:
        """Write the models, and what describes them, into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self._files().items():
            (directory / name).write_bytes(content)

    def _files(self) -> dict[str, bytes]:
        """Name and content of every file; the description last."""
        shared = self.source is self.target
        names = ("shared.model", "shared.model") if shared else ("source.model", "target.model")
        files = {names[0]: self.source.model, names[1]: self.target.model}
        description = {
            "format_version": FORMAT_VERSION,
            "source": names[0],
            "target": names[1],
            "numbering": None,
            "tags": self.tags,
            "tag_place": self.tag_place,
        }
        if self.source.numbering is not None:
            description["numbering"] = "pieces.json"
            files["pieces.json"] = json.dumps(self.source.numbering, ensure_ascii=False).encode()
        if self.target.numbering != self.source.numbering:
            description["target_numbering"] = "target_pieces.json"
            numbering = json.dumps(self.target.numbering, ensure_ascii=False)
            files["target_pieces.json"] = numbering.encode()
        if self.special != OURS:
            description["special"] = self.special._asdict()
        return files | {_DESCRIPTION: json.dumps(description, indent=2).encode()}

    @property
    def vocab_size(self) -> int:
        """Number of target ids, special ones included."""
        return self.target.size

    @property
    def source_vocab_size(self) -> int:
        """Number of source ids, special ones included."""
        return self.source.size

    @property
    def fingerprint(self) -> str:
        """Hash that a checkpoint keeps, so that weights never meet another tokenizer."""
        digest = hashlib.sha256()
        for name, content in sorted(self._files().items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def encode_source(
        self,
        texts: Sequence[str],
        source_lang: str | None = None,
        target_lang: str | None = None,
        sampled: Sampled | None = None,
    ) -> list[list[int]]:
        """Ids of each text, a tag first where there are tags, EOS last.

        A text without pieces is its tag and EOS alone.

        Raises:
            ConfigError: a language without a tag.
        """
        if self.tag_place == "both":
            tag = self._tag(source_lang, "source_lang")
            return [[*tag, *ids, self.eos_id] for ids in self.source.encode(texts, sampled)]
        cut = [self._own_tag(text) for text in texts]
        encoded = self.source.encode([text for _, text in cut], sampled)
        return [
            [*self._tag(own or target_lang, "target_lang"), *ids, self.eos_id]
            for (own, _), ids in zip(cut, encoded, strict=True)
        ]

    def encode_target(
        self,
        texts: Sequence[str],
        target_lang: str | None = None,
        sampled: Sampled | None = None,
    ) -> list[list[int]]:
        """Ids of each text as the decoder is to write it, EOS last."""
        prefix = self.target_prefix(target_lang)
        return [[*prefix, *ids, self.eos_id] for ids in self.target.encode(texts, sampled)]

    def target_prefix(self, target_lang: str | None = None) -> list[int]:
        """Ids that every target begins with, forced in decoding."""
        return self._tag(target_lang, "target_lang") if self.tag_place == "both" else []

    def decode(self, ids: Any) -> str:
        """Text of target ids (list, NumPy or JAX array), on one line; special ids are left out."""
        return self.target.decode(self._real(ids))

    def pieces(self, ids: Any) -> list[str]:
        """The pieces of target ids, as strings."""
        return [self.target.piece(i) for i in self._real(ids)]

    def _own_tag(self, text: str) -> tuple[str | None, str]:
        """The language that a text asks for itself, and the rest of it."""
        if self.tags and text.startswith(">>"):
            lang, found, rest = text[2:].partition("<<")
            if found and lang in self.tags:
                return lang, rest
        return None, text

    def _tag(self, lang: str | None, name: str) -> list[int]:
        if not self.tags:
            return []
        if lang not in self.tags:
            known = ", ".join(sorted(self.tags))
            raise ConfigError(f"{name}: got {lang!r}, allowed: {known}")
        return [self.tags[lang]]

    def _real(self, ids: Any) -> list[int]:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return [int(i) for i in values if i not in self._no_text and 0 <= i < self.vocab_size]


def _tag_piece(lang: str) -> str:
    return f"<2{lang}>"


def _existing(field: str, path: str, langs: Sequence[str]) -> Pieces:
    """The model of a file. Where it has other special ids than ours, such as SentencePiece's own
    (0 unknown, 1 start, 2 EOS), or lacks tags, its pieces are numbered anew behind ours."""
    try:
        model = Path(path).expanduser().read_bytes()
        own = sentencepiece.SentencePieceProcessor(model_proto=model)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "not a SentencePiece model"
        raise ConfigError(f"--tokenizer.{field.replace('_', '-')}: {path}: {why}") from None
    special = own.pad_id(), own.eos_id(), own.unk_id(), own.bos_id()
    if special == (PAD, EOS, UNK, START) and not langs:
        return Pieces(model)
    names = [own.id_to_piece(i) if i >= 0 else f"<no {i}>" for i in special]
    others = [own.id_to_piece(i) for i in range(own.get_piece_size()) if i not in special]
    numbering = [*names, *others, *map(_tag_piece, langs)]
    tags = range(len(numbering) - len(langs), len(numbering))
    return Pieces(model, numbering, never=(PAD, EOS, UNK, START, *tags))


def _spread(rows: Rows, most: int) -> Iterator[Sequence[str]]:
    """At most so many rows, evenly spread, in one reading."""
    total = len(rows)
    count = min(total, most)
    wanted = (i * total // count for i in range(count))
    following = next(wanted, None)
    for i, row in enumerate(rows):
        if i == following:
            yield row
            following = next(wanted, None)


def _learn(texts: Iterable[str], config: TokenizerConfig, tags: Sequence[str]) -> Pieces:
    """A SentencePiece model of some texts; the tags are pieces that no text contains."""
    model, failed = io.BytesIO(), []

    def lines() -> Iterator[str]:
        try:
            yield from (clean(text) for text in texts)
        except ConfigError as error:  # SentencePiece would make another error of it
            failed.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type=config.kind,
            vocab_size=config.vocab_size,
            byte_fallback=config.byte_fallback,
            split_digits=config.split_digits,
            normalization_rule_name=config.normalization,
            remove_extra_whitespaces=config.normalization != "identity",
            character_coverage=1.0 if not config.byte_fallback else 0.9995,
            control_symbols=list(tags),
            pad_id=PAD,
            eos_id=EOS,
            unk_id=UNK,
            bos_id=START,
            num_threads=1,
            max_sentence_length=16384,
            minloglevel=2,
        )
    except RuntimeError as error:
        if not failed:
            raise ConfigError(_vocabulary_message(config, str(error))) from None
    if failed:
        raise failed[0]
    return Pieces(model.getvalue())


def _read(directory: Path) -> dict[str, bytes]:
    """Content of the files of a tokenizer directory."""
    if not (directory / _DESCRIPTION).is_file():
        raise ConfigError(f"{directory / _DESCRIPTION}: no such file, so the run has no tokenizer")
    try:
        return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be read: {error.strerror}") from None


def _vocabulary_message(config: TokenizerConfig, error: str) -> str:
    flag = "--tokenizer.vocab-size"
    too_high = re.search(r"Vocabulary size too high \(\d+\).*<= (\d+)", error)
    if too_high:
        allowed = f"at most {too_high[1]} (the text holds no more pieces)"
    elif "smaller than required_chars" in error or "required_chars" in error:
        needed = re.search(r"(\d+) vs (\d+)", error)
        allowed = f"more than {max(map(int, needed.groups())) if needed else 'the alphabet'}"
        allowed += " (each character and byte of the text needs a piece)"
    else:
        return f"{flag}: {config.vocab_size}: SentencePiece could not be trained: {error.strip()}"
    return f"{flag}: got {config.vocab_size}, allowed: {allowed}"
