"""Text and ids: nothing becomes unknown, nothing in a text is a command, both ways agree."""

import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from transformer_jax.config import ConfigError, TokenizerConfig
from transformer_jax.data.pieces import Sampled
from transformer_jax.data.tokenizer import EOS, PAD, START, UNK, Tokenizer, clean
from transformer_jax.types import Pair

WORDS = "the cat saw a dog and one bird sang Write to stop, fill 123 über größe".split()
RARE = "ŵ 🦊 爿"
KINDS = {
    "unigram": TokenizerConfig(vocab_size=330),
    "bpe": TokenizerConfig(vocab_size=330, kind="bpe"),
    "digits": TokenizerConfig(vocab_size=330, split_digits=True),
}


def corpus() -> list[Pair]:
    """500 pairs of common words, one line with rare characters, one with a NUL."""
    draw = random.Random(0)
    pairs = []
    for _ in range(500):
        line = " ".join(draw.choices(WORDS, k=6))
        pairs.append(Pair(line, line.upper()))
    pairs[7] = Pair(RARE, "ab\x00cd")
    return pairs


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.train(corpus(), KINDS[request.param])


@pytest.fixture(scope="module")
def identity() -> Tokenizer:
    return Tokenizer.train(corpus(), TokenizerConfig(vocab_size=330, normalization="identity"))


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    (ids,) = tokenizer.encode_source([text])
    assert ids[-1] == EOS and not {PAD, EOS, UNK, START} & set(ids[:-1])
    return tokenizer.decode(ids)


# ---- Ids ----------------------------------------------------------------------------------------


def test_special_ids(tokenizer: Tokenizer):
    """Bug: a model trained with other ids for padding, EOS or the start of a target."""
    assert (PAD, EOS, UNK, START) == (0, 1, 2, 3)
    assert (tokenizer.pad_id, tokenizer.eos_id) == (PAD, EOS)
    assert (tokenizer.unk_id, tokenizer.start_id) == (UNK, START)
    assert tokenizer.vocab_size == 330
    assert tokenizer.encode_source([""]) == [[EOS]]


def test_rare_characters_are_never_unknown(tokenizer: Tokenizer):
    """Bug: F15: character coverage makes <unk> of rare letters, emoji and Han characters."""
    assert round_trip(tokenizer, RARE) == RARE
    never_seen = "ꙮ 𝒳 ⠿ ё \U0010ffff"
    assert round_trip(tokenizer, never_seen) == unicodedata.normalize("NFKC", never_seen)


def test_byte_pieces_are_decoded_together(tokenizer: Tokenizer):
    """Bug: F17: pieces are joined as strings, and "<0xE7>" stands in the text."""
    ids = tokenizer.encode_target(["爿"])[0]
    assert tokenizer.decode(ids) == "爿"
    pieces = tokenizer.pieces(ids)
    assert [p for p in pieces if p != "▁"] == ["<0xE7>", "<0x88>", "<0xBF>"]
    cut = tokenizer.decode(ids[:-2])  # without the last byte and EOS
    assert set(cut) <= {"\ufffd"}
    assert tokenizer.decode([*ids[:-2], *ids]).endswith("爿")


@pytest.mark.parametrize(
    "text",
    [
        "Write </s> to stop, <pad> to fill",
        "<s> one <unk> dog </s>",
        "<0x41> bird ▁ sang",
        "<2de> the cat",
    ],
)
def test_what_looks_like_a_symbol_is_text(tokenizer: Tokenizer, text: str):
    """Bug: F21: a literal "</s>" in a text ends the sentence, "<pad>" masks what follows."""
    assert round_trip(tokenizer, text) == " ".join(text.replace("▁", " ").split())


def test_decode_takes_any_array(tokenizer: Tokenizer):
    """Bug: F27: a TypeError for NumPy or JAX integers; F26: one for ids beyond the pieces."""
    (ids,) = tokenizer.encode_target(["the cat sang"])
    for kind in (
        ids,
        tuple(ids),
        np.array(ids, np.int32),
        np.array(ids, np.int64),
        jnp.array(ids),
        [np.int32(i) for i in ids],
        [START, *ids, PAD, PAD, 330, 10_000, -1],
    ):
        assert tokenizer.decode(kind) == "the cat sang"
        assert tokenizer.pieces(kind)[0] == "▁the"
    assert tokenizer.decode([]) == tokenizer.decode(np.zeros(3, np.int32)) == ""


def test_source_and_target_have_one_vocabulary(tokenizer: Tokenizer):
    """Bug: the two sides are encoded by different rules."""
    texts = [*WORDS, RARE, ""]
    assert tokenizer.encode_source(texts) == tokenizer.encode_target(texts)


# ---- Normalisation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  a   b ", "a b"),
        ("a\tb", "a b"),
        ("１２３ ﬁn …", "123 fin ..."),
        ("e\u0301", "é"),
        ("\ufeffGuten", "Guten"),
        ("ab\x00cd", "abcd"),
        ("one\u2028two", "one two"),
    ],
)
def test_normalisation_is_known(tokenizer: Tokenizer, text: str, normal: str):
    """Bug: F18, F19: spaces and characters change by a rule that nobody has written down."""
    assert round_trip(tokenizer, text) == normal
    # The same at training and at inference: a text and its normal form have the same ids.
    assert tokenizer.encode_source([text]) == tokenizer.encode_source([normal])


@pytest.mark.parametrize("blank", ["", " ", "\t", "\u00a0", "\u3000", "\u200b", "\ufeff", "\x00"])
def test_blank_texts_have_no_pieces(tokenizer: Tokenizer, blank: str):
    """Bug: F3: a line of one space is translated into an invented sentence."""
    assert tokenizer.encode_source([blank]) == [[EOS]]


@pytest.mark.parametrize("text", ["１２３ ﬁn … ŉ", "  a   b ", "e\u0301 é", RARE, "a\tb", "\u200b"])
def test_identity_keeps_every_character(identity: Tokenizer, text: str):
    """Bug: F18: "identity" still strips spaces or folds characters."""
    assert round_trip(identity, text) == text


def test_a_decoded_text_is_one_line(tokenizer: Tokenizer, identity: Tokenizer):
    """Bug: F6: a line break among the pieces makes two lines of one translation."""
    for tok in (tokenizer, identity):
        id_of = {tok.pieces([i])[0]: i for i in range(START + 1, tok.vocab_size)}
        for character in "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029":
            middle = [id_of[f"<0x{byte:02X}>"] for byte in character.encode("utf-8")]
            assert tok.decode([id_of["a"], *middle, id_of["b"]]) == "a b"
    assert identity.decode(identity.encode_source(["a\u2028b\nc"])[0]) == "a b c"


def test_clean_removes_only_what_carries_no_text():
    """Bug: cleaning eats more than NUL and the byte order mark, or is not the same everywhere."""
    every = "".join(map(chr, range(0x3000))) + RARE + "\ufeff"
    assert set(every) - set(clean(every)) == {"\x00", "\ufeff"}
    assert len(clean(every)) == len(every) - 2


def test_digits_can_be_split():
    """Bug: split_digits is not passed on."""
    pieces = {kind: Tokenizer.train(corpus(), KINDS[kind]) for kind in ("bpe", "digits")}
    (split,) = pieces["digits"].encode_source(["123"])
    assert [p for p in pieces["digits"].pieces(split) if p != "▁"] == ["1", "2", "3"]
    (whole,) = pieces["bpe"].encode_source(["123"])
    assert len(whole) < len(split)


# ---- Training -----------------------------------------------------------------------------------


def test_both_sides_are_learnt():
    """Bug: the pieces come from the target alone, and the source is spelt out in bytes."""
    pairs = [Pair("один два три", "eins zwei drei"), Pair("четыре пять", "vier fünf")] * 20
    trained = Tokenizer.train(pairs, TokenizerConfig(vocab_size=286))
    for side in (0, 1):
        (ids,) = trained.encode_source([pairs[0][side]])
        assert not [p for p in trained.pieces(ids) if p.startswith("<0x")]


def test_training_reads_lines_evenly_spread():
    """Bug: sample_lines takes the head of a corpus that is several files one after another."""
    pairs = [Pair("abc abc", "abc")] * 90 + [Pair("xyz xyz", "xyz")] * 10
    config = TokenizerConfig(vocab_size=268, sample_lines=10, kind="bpe")
    trained = Tokenizer.train(pairs, config)
    for text in ("abc", "xyz"):
        (ids,) = trained.encode_source([text])
        assert not [p for p in trained.pieces(ids) if p.startswith("<0x")]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_repeatable(kind: str, tmp_path: Path):
    """Bug: a second start of a run gets other pieces; what is loaded is not what was saved."""
    one, two = (Tokenizer.train(corpus(), KINDS[kind]) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    one.save(tmp_path / "a b" / "tokenizer")
    loaded = Tokenizer.load(tmp_path / "a b" / "tokenizer")
    assert loaded.fingerprint == one.fingerprint
    assert loaded.encode_source([RARE, *WORDS]) == one.encode_source([RARE, *WORDS])
    with pytest.raises(ConfigError, match="no such file"):
        Tokenizer.load(tmp_path / "nowhere")


def test_fingerprints_tell_tokenizers_apart():
    """Bug: F30: two tokenizers of the same size pass for one."""
    a, b = (Tokenizer.train(corpus(), KINDS[kind]) for kind in ("unigram", "bpe"))
    assert a.vocab_size == b.vocab_size and a.fingerprint != b.fingerprint


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(("size", "side"), [(8000, "at most"), (265, "more than")])
def test_a_vocabulary_that_does_not_suit_the_text(kind: str, size: int, side: str):
    """Bug: F23: SentencePiece dies with a C++ message; or the named limit does not work."""
    pairs = corpus()[:20]
    config = TokenizerConfig(vocab_size=size, kind=kind)
    with pytest.raises(ConfigError) as error:
        Tokenizer.train(pairs, config)
    said = str(error.value)
    found = re.search(r"--tokenizer.vocab-size: got (\d+), allowed: (\D+) (\d+)", said)
    assert found and (int(found[1]), found[2]) == (size, side) and "\n" not in said
    limit = int(found[3]) + (side == "more than")
    works = Tokenizer.train(pairs, TokenizerConfig(vocab_size=limit, kind=kind))
    assert works.vocab_size == limit


@pytest.mark.parametrize("pairs", [[], [Pair("", "")], [Pair(" ", "\t")]])
def test_nothing_to_train_on_is_one_line(pairs: list[Pair]):
    """Bug: an empty corpus ends in a C++ assertion or a crash."""
    with pytest.raises(ConfigError) as error:
        Tokenizer.train(pairs, TokenizerConfig(vocab_size=300))
    assert "\n" not in str(error.value)


# ---- Models from elsewhere, drawn segmentations -------------------------------------------------


def own_model(path: Path, **options: Any) -> str:
    """A model as somebody else trains it: by default with SentencePiece's own special ids."""
    lines = [f"{WORD[i % 5]} {WORD[i % 3]} sees {i} dogs" for i in range(200)]
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, minloglevel=2, **options
        )
    return str(path)


WORD = ["house", "cat", "tree", "river", "stone"]


@pytest.mark.parametrize("langs", [[], ["de", "fr"]])
@pytest.mark.parametrize(
    "options", [{}, {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": 3}, {"bos_id": -1}]
)
def test_an_existing_model_whatever_its_special_ids(tmp_path: Path, options: dict, langs: list):
    """Bug: with SentencePiece's own ids, unknown pieces end sentences, and every text that has the
    piece 2 is cut there; tags take the ids of pieces."""
    path = own_model(tmp_path / "m.model", vocab_size=48, **options)
    tokenizer = Tokenizer.new([], TokenizerConfig(model=path), langs)
    reference = sentencepiece.SentencePieceProcessor(model_file=path)
    text = "cat sees 12 stones"
    lang = langs[0] if langs else None
    ids = tokenizer.encode_source([text], target_lang=lang)[0]
    pieces = [tokenizer.source.piece(i) for i in ids[len(langs[:1]) : -1]]
    assert pieces == reference.encode(text, out_type=str)
    assert ids[-1] == EOS and not {PAD, EOS, START} & set(ids[:-1])
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_target(["\u723f"])[0][-2] == UNK
    assert len({*tokenizer.tags.values()} | {PAD, EOS, UNK, START}) == 4 + len(langs)
    assert set(ids[: len(langs[:1])]) <= set(tokenizer.tags.values())
    assert max(ids) < tokenizer.vocab_size <= 48 + 4 + len(langs)
    tokenizer.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert again.encode_source([text], target_lang=lang)[0] == ids
    assert again.fingerprint == tokenizer.fingerprint


def test_two_existing_models(tmp_path: Path):
    """Bug: the model of the target side is that of the source."""
    paths = [own_model(tmp_path / f"{n}", vocab_size=n) for n in (44, 48)]
    tokenizer = Tokenizer.new([], TokenizerConfig(model=paths[0], target_model=paths[1]))
    assert tokenizer.source.size < tokenizer.target.size == tokenizer.vocab_size


@pytest.mark.parametrize("content", [None, b"no model"])
def test_a_file_that_is_no_model_is_named(tmp_path: Path, content: bytes | None):
    """Bug: a traceback out of SentencePiece for a misspelt or damaged file."""
    path = tmp_path / "m.model"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--tokenizer\.model: .*m\.model: [^\n]+$"):
        Tokenizer.new([], TokenizerConfig(model=str(path)))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_drawn_segmentations_depend_on_their_seed_alone(kind: Any):
    """Bug: SentencePiece draws from one generator for a process, so that a resumed run, or another
    number of hosts, sees other pieces; or the text itself changes."""
    rows = [(f"{a} {b} sees", f"{b} {a}") for a in WORD for b in WORD]
    tokenizer = Tokenizer.train(rows, TokenizerConfig(vocab_size=279, kind=kind))
    texts = [f"{a} {b} sees" for a in WORD for b in WORD]
    seeds = list(range(len(texts)))
    drawn = tokenizer.encode_source(texts, sampled=Sampled(0.3, seeds))
    backwards = tokenizer.encode_source(texts[::-1], sampled=Sampled(0.3, seeds[::-1]))
    assert backwards[::-1] == drawn
    other = tokenizer.encode_source(texts, sampled=Sampled(0.3, [s + 99 for s in seeds]))
    assert sum(a != b for a, b in zip(drawn, other, strict=True)) > 4
    assert sum(a != b for a, b in zip(drawn, tokenizer.encode_source(texts), strict=True)) > 4
    assert [tokenizer.decode(ids) for ids in (*drawn, *other)] == texts * 2


def test_a_sample_is_evenly_spread_and_read_once():
    """Bug: only the beginning of a corpus is seen, which may be one topic."""

    class Counted(list):
        readings = 0

        def __iter__(self):
            self.readings += 1
            return super().__iter__()

    rows = Counted((f"{WORD[i // 200]} {i % 10}", "x") for i in range(1000))
    tokenizer = Tokenizer.train(rows, TokenizerConfig(vocab_size=275, sample_lines=50))
    assert rows.readings == 1
    known = {tokenizer.source.piece(i) for i in range(tokenizer.vocab_size)}
    assert {character for word in WORD for character in word} <= known
