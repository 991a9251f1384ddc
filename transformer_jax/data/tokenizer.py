"""Text and token ids: SentencePiece, trained once and kept with the run."""

import hashlib
import io
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from transformer_jax.config import ConfigError, TokenizerConfig

PAD, EOS, UNK, START = 0, 1, 2, 3
_FILE = "sentencepiece.model"
# A byte order mark or a NUL inside a line carries no text.
_INVISIBLE = str.maketrans({"\ufeff": None, "\x00": None})
# Every character at which Python, or an editor, would break a line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]+")

logger = logging.getLogger(__name__)


class Tokenizer:
    """One SentencePiece model for both languages.

    Ids: 0 pad, 1 EOS, 2 unknown, 3 the start of a target. These are control symbols: a literal
    "</s>" in a text is text.
    """

    pad_id, eos_id, unk_id, start_id = PAD, EOS, UNK, START

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._keeps_spaces = bool(self._processor.encode(" "))  # normalization "identity" does

    @classmethod
    def train(cls, pairs: Sequence[Sequence[str]], config: TokenizerConfig) -> "Tokenizer":
        """Learn pieces from sentence pairs: from both sides, or from all texts of longer rows.

        Of more than sample_lines rows, as many are taken, evenly spread.

        Raises:
            ConfigError: the vocabulary size does not suit the text.
        """
        count = min(len(pairs), config.sample_lines)
        lines = (line for i in range(count) for line in pairs[i * len(pairs) // count])
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(clean(line) for line in lines),
                model_writer=model,
                model_type=config.kind,
                vocab_size=config.vocab_size,
                byte_fallback=config.byte_fallback,
                split_digits=config.split_digits,
                normalization_rule_name=config.normalization,
                remove_extra_whitespaces=config.normalization != "identity",
                character_coverage=1.0 if not config.byte_fallback else 0.9995,
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNK,
                bos_id=START,
                num_threads=1,
                max_sentence_length=16384,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ConfigError(_vocabulary_message(config, str(error))) from None
        return cls(model.getvalue())

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer that `save` wrote."""
        path = directory / _FILE
        if not path.is_file():
            raise ConfigError(f"{path}: no such file, so the run has no tokenizer")
        return cls(path.read_bytes())

    def save(self, directory: Path) -> None:
        """Write the model file into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _FILE).write_bytes(self._model)

    @property
    def vocab_size(self) -> int:
        """Number of pieces, special ids included."""
        return self._processor.get_piece_size()

    @property
    def fingerprint(self) -> str:
        """Hash that a checkpoint keeps, so that weights never meet another tokenizer."""
        return hashlib.sha256(self._model).hexdigest()

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, EOS last; [EOS] alone for a text without pieces."""
        ids = self._processor.encode([clean(text) for text in texts])
        return [[*sentence, EOS] for sentence in ids]

    def encode_target(self, texts: Sequence[str]) -> list[list[int]]:
        """As encode_source, with the pieces of the target language."""
        return self.encode_source(texts)

    def decode(self, ids: Any) -> str:
        """Text of target ids (list, NumPy or JAX array), on one line; special ids are left out."""
        text = self._processor.decode(self._real(ids))
        text = _LINE_BREAKS.sub(" ", text)
        return text if self._keeps_spaces else text.strip()

    def pieces(self, ids: Any) -> list[str]:
        """The pieces of target ids, as strings."""
        return [self._processor.id_to_piece(i) for i in self._real(ids)]

    def _real(self, ids: Any) -> list[int]:
        values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        return [int(i) for i in values if START < i < self.vocab_size]


def clean(line: str) -> str:
    """A line without invisible bytes; the same at training and at inference."""
    return line.translate(_INVISIBLE)


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
