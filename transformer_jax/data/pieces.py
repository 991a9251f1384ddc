"""One SentencePiece model: the text of one side and its pieces, numbered; ids that are no text."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import sentencepiece

PAD, EOS, UNK, START = 0, 1, 2, 3

# A byte order mark or a NUL inside a line carries no text.
_INVISIBLE = str.maketrans({"\ufeff": None, "\x00": None})
# Every character at which Python, or an editor, would break a line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]+")


class SpecialIds(NamedTuple):
    """Ids that stand for no text; an imported model has its own."""

    pad: int = PAD
    eos: int = EOS
    unk: int = UNK
    start: int = START
    forbidden: tuple[int, ...] = (PAD, UNK, START)  # never chosen in decoding
    others: tuple[int, ...] = ()  # <s>, <mask>, rows without a piece

    @property
    def all(self) -> frozenset[int]:
        """All of them."""
        return frozenset((*self[:4], *self.forbidden, *self.others))


OURS = SpecialIds()


class Sampled(NamedTuple):
    """How to draw segmentations."""

    alpha: float  # unigram: smoothing, 1 follows the model; bpe: probability to drop a merge
    seeds: Sequence[int]  # of each text, below 2**31


class Pieces:
    """A SentencePiece model and the numbers of its pieces.

    Args:
        model: the serialised model.
        numbering: the piece of each id; None: the model's own ids. Models that come from elsewhere
            number the pieces of both sides by one list.
        unk: id of pieces that the numbering lacks.
        never: ids that no text has, whatever it says.
    """

    def __init__(
        self,
        model: bytes,
        numbering: Sequence[str] | None = None,
        unk: int = UNK,
        never: Collection[int] = (),
    ) -> None:
        self.model, self.numbering = model, None if numbering is None else list(numbering)
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._unk, self._ids = unk, None
        if numbering is not None:
            self._ids = {piece: i for i, piece in enumerate(numbering) if i not in never}
        self._keeps_spaces = bool(self._processor.encode(" "))  # normalization "identity" does

    @property
    def size(self) -> int:
        """Number of ids."""
        return self._processor.get_piece_size() if self.numbering is None else len(self.numbering)

    def encode(self, texts: Sequence[str], sampled: Sampled | None = None) -> list[list[int]]:
        """Ids of each text, without special ones; the likeliest, or drawn."""
        texts = [clean(text) for text in texts]
        out_type = int if self._ids is None else str
        if sampled is None:
            found = self._processor.encode(texts, out_type=out_type)
        else:
            found = [
                self._draw(text, out_type, sampled.alpha, seed)
                for text, seed in zip(texts, sampled.seeds, strict=True)
            ]
        if self._ids is None:
            return found
        numbers = self._ids
        return [[numbers.get(piece, self._unk) for piece in pieces] for pieces in found]

    def _draw(self, text: str, out_type: type, alpha: float, seed: int) -> list:
        sentencepiece.set_random_generator_seed(seed)
        return self._processor.encode(
            text, out_type=out_type, enable_sampling=True, alpha=alpha, nbest_size=-1
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, on one line."""
        if self.numbering is None:
            text = self._processor.decode(list(ids))
        else:
            text = self._processor.decode_pieces([self.numbering[i] for i in ids])
            text = text.replace("▁", " ")  # in pieces that this side's model does not have
        text = _LINE_BREAKS.sub(" ", text)
        return text if self._keeps_spaces else text.strip()

    def piece(self, number: int) -> str:
        """The piece of an id."""
        if self.numbering is None:
            return self._processor.id_to_piece(number)
        return self.numbering[number]

    def number(self, piece: str) -> int:
        """The id of a piece."""
        if self.numbering is None:
            return self._processor.piece_to_id(piece)
        return self.numbering.index(piece)


def clean(line: str) -> str:
    """A line without invisible bytes; the same at training and at inference."""
    return line.translate(_INVISIBLE)
