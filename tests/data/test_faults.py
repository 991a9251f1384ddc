"""Faults that users of comparable software have met, each with its scenario and the right value.

A row is a function called with a Room; its docstring says what went wrong elsewhere. Rows about
translations meet a tiny model with random parameters: what it says does not matter, only that
every line is answered, in its place.
"""

import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax import bulk
from transformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TokenizerConfig,
)
from transformer_jax.data import prepared
from transformer_jax.data.alignment import shifted_stretches
from transformer_jax.data.batching import Bucket, collate
from transformer_jax.data.files import read_lines, read_parallel
from transformer_jax.data.pipeline import Position, eval_batches, train_batches, train_data
from transformer_jax.data.sources import Corpus, Part, load_splits
from transformer_jax.data.store import encode_pairs
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.translator import Translator
from transformer_jax.model import Model
from transformer_jax.types import Pair

pytestmark = pytest.mark.usefixtures("quick_compilation")
REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = "one two three four five six seven eight nine ten".split()
NUMBERS = [Pair(" ".join(WORDS[int(d)] for d in str(i * i)), str(i * i)) for i in range(100)]
ROWS: dict[str, Callable[["Room"], None]] = {}


class Room:
    """A directory, and a translator to be made once."""

    translator_of_all: Translator | None = None

    def __init__(self, path: Path, log: pytest.LogCaptureFixture) -> None:
        self.path, self.log = path, log

    def write(self, name: str, content: str | bytes) -> str:
        data = content.encode("utf-8") if isinstance(content, str) else content
        (self.path / name).write_bytes(data)
        return str(self.path / name)

    def tokenizer(self, texts: Sequence[str] = (), **fields: Any) -> Tokenizer:
        pairs = [*NUMBERS, *(Pair(text, text) for text in texts)]
        return Tokenizer.train(pairs, TokenizerConfig(**({"vocab_size": 300} | fields)))

    def translator(self) -> Translator:
        if Room.translator_of_all is None:
            tokenizer = self.tokenizer(kind="bpe")
            sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2}
            layers = {"encoder_layers": 1, "decoder_layers": 1}
            model = ModelConfig(vocab_size=tokenizer.vocab_size + 84, **sizes, **layers)
            decode = DecodeConfig(beam_size=1, max_extra_tokens=3)
            params = jax.jit(Model(model).init)(jax.random.key(0))
            config = Config(model=model, decode=decode)
            Room.translator_of_all = Translator(params, config, tokenizer)
        return Room.translator_of_all

    def config(self, **fields: Any) -> Config:
        sizes = {"global_batch_tokens": 160, "num_buckets": 3, "cache_dir": str(self.path / "c")}
        return Config(
            data=DataConfig(**({"max_target_tokens": 40, "max_source_tokens": 80} | sizes | fields))
        )

    def data(self, pairs: Sequence[Pair], tokenizer: Tokenizer, devices: int = 1, **fields: Any):
        corpus = Corpus([Part("x", list(pairs), ("en", "de"))])
        return train_data(corpus, tokenizer, self.config(**fields), devices)


def fault(*names: str) -> Callable[[Callable[[Room], None]], None]:
    def keep(row: Callable[[Room], None]) -> None:
        assert row.__doc__
        ROWS.update({f"{name} {row.__name__}": row for name in names})

    return keep


def refusal(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def texts_of(batches: Any, tokenizer: Tokenizer) -> Counter[str]:
    """Source texts of all segments."""
    found: Counter[str] = Counter()
    for batch in batches:
        for row, segments in zip(batch.src_ids, batch.src_segments, strict=True):
            for segment in range(1, int(segments.max(initial=0)) + 1):
                found[tokenizer.decode(row[segments == segment])] += 1
    return found


# ---- Lines --------------------------------------------------------------------------------------


@fault("F1", "F14")
def blank_lines_stay_in_their_place(room: Room) -> None:
    """After a chunk, translations land on the wrong lines; lines behind the shards are lost."""
    translator = room.translator()
    blank = {2, 3, 4, 5, 11, 12}
    lines = ["" if i in blank else WORDS[i % 4] for i in range(1, 21)]
    alone = {line: translator.translate([line])[0] for line in set(lines)}
    assert alone[""] == ""
    size = bulk.CHUNK_LINES
    try:
        for bulk.CHUNK_LINES in (1, 4, 1000):
            found = [t for chunk in bulk.chunks(lines) for t in translator.translate(chunk)]
            assert found == [alone[line] for line in lines]
    finally:
        bulk.CHUNK_LINES = size


@fault("F2")
def an_empty_line_is_answered_by_one(room: Room) -> None:
    """One empty line ends the whole run with a shape error."""
    translator = room.translator()
    hello, nothing, bye = translator.translate(["one two", "", "three"])
    assert nothing == "" and [hello, bye] == translator.translate(["one two", "three"])
    translate, translator.params = translator.params, None  # a model that cannot be called
    try:
        assert translator.translate(["", ""]) == ["", ""]
    finally:
        translator.params = translate


@fault("F3")
def white_space_is_not_translated(room: Room) -> None:
    """A line with only a space becomes an invented sentence."""
    blank = [" ", "\t", "\u00a0", "\u3000", "\u200b"]
    assert room.translator().translate(blank) == [""] * 5
    tokenizer = room.translator().tokenizer
    assert tokenizer.encode_source(blank) == [[tokenizer.eos_id]] * 5


@fault("F5")
def only_newlines_end_lines(room: Room) -> None:
    """str.splitlines() makes two records of one."""
    path = room.write("a", "one\u2028two\nthree\x0cfour\x85five\n")
    assert list(read_lines(path)) == ["one\u2028two", "three\x0cfour\x85five"]
    assert len(read_parallel(path, path)) == 2
    config = DataConfig(train_source=(path,), train_target=(path,))
    assert len(load_splits(config).train) == len(list(load_splits(config).train)) == 2


@fault("F6")
def a_translation_is_one_line(room: Room) -> None:
    """A decoded newline makes two lines of one hypothesis."""
    tokenizer = room.tokenizer(["foo bar"], normalization="identity")
    for text in ("foo\nbar", "foo\u2028bar", "foo\x85\x0bbar"):
        decoded = tokenizer.decode(tokenizer.encode_target([text])[0])
        assert decoded == "foo bar" and len(decoded.splitlines()) == 1


@fault("F7")
def sides_of_different_length_are_refused(room: Room) -> None:
    """zip() stops at the shorter file, and only the quality tells."""
    source = room.write("s", "x\n" * 100)
    for name, content in (("t", "x\n" * 99), ("u", "x\n" * 100 + "\n")):
        target = room.write(name, content)
        said = refusal(load_splits, DataConfig(train_source=(source,), train_target=(target,)))
        assert source in said and target in said
        assert " 100 " in said and f" {content.count(chr(10))};" in said


@fault("F9")
def byte_order_marks_are_no_text(room: Room) -> None:
    """The first sentence gets an unknown token."""
    tokenizer = room.tokenizer(["Guten Tag"])
    lines = list(
        read_lines(
            room.write("a", b"\xef\xbb\xbfGuten Tag\n" + b"x\n" * 5 + b"\xef\xbb\xbfGuten Tag\n")
        )
    )
    wanted = tokenizer.encode_source(["Guten Tag"])[0]
    assert tokenizer.encode_source([lines[0], lines[6]]) == [wanted, wanted]
    assert tokenizer.unk_id not in wanted


@fault("F10")
def null_characters_are_counted_and_cleaned(room: Room) -> None:
    """NUL bytes flood the log and end the training of the tokenizer."""
    path = room.write("a", "".join(f"{p.source}\n" for p in NUMBERS) + "ab\x00cd\n\x00\n")
    config = DataConfig(train_source=(path,), train_target=(path,))
    corpus = load_splits(config).train
    assert f"{path}:101: 2 NUL characters" in room.log.text
    tokenizer = Tokenizer.train(corpus, TokenizerConfig(vocab_size=280))
    assert tokenizer.encode_source(["ab\x00cd"]) == tokenizer.encode_source(["abcd"])
    assert isinstance(room.translator().translate(["one\x00two"])[0], str)


@fault("F11")
def a_long_line_is_answered(room: Room) -> None:
    """Decoding stops at the first line that is too long, and the output is shorter."""
    long = " ".join(WORDS * 30)
    lines = ["one", "two", long, "three", "four"]
    found = room.translator().translate_nbest(lines, max_source_tokens=16)
    assert len(found) == 5
    assert [h[0].truncated_source for h in found] == [False, False, True, False, False]


@fault("F13")
def evaluation_data_are_not_filtered(room: Room) -> None:
    """The training limit also drops long sentences of the validation set."""
    tokenizer = room.tokenizer()
    pairs = [*NUMBERS[:9], Pair(" ".join(WORDS * 40), "1 " * 300)]
    encoded = encode_pairs(pairs, tokenizer)
    assert encoded.lengths[9].min() > 128
    found = texts_of(eval_batches(encoded, 160, 1), tokenizer)
    assert found == Counter(pair.source for pair in pairs)


# ---- Tokens -------------------------------------------------------------------------------------


@fault("F15")
def rare_characters_are_never_unknown(room: Room) -> None:
    """Rare letters, emoji and Han characters become <unk>."""
    rare = "\u0175 \U0001f98a \u723f"
    tokenizer = Tokenizer.train(
        [*(p for p in NUMBERS for _ in range(10)), Pair(rare, "x")], TokenizerConfig(vocab_size=300)
    )
    ids = tokenizer.encode_target([rare])[0]
    assert tokenizer.unk_id not in ids and tokenizer.decode(ids) == rare


@fault("F17")
def bytes_are_joined_to_characters(room: Room) -> None:
    """'<0xE7><0x88>' stands in the text."""
    tokenizer = room.tokenizer()
    ids = tokenizer.encode_target(["\u723f"])[0]
    pieces = tokenizer.pieces(ids)
    assert [p for p in pieces if p.startswith("<0x")] == ["<0xE7>", "<0x88>", "<0xBF>"]
    assert tokenizer.decode(ids) == "\u723f"
    assert "<0x" not in tokenizer.decode(ids[:-2])


@fault("F18")
def normalisation_is_a_choice(room: Room) -> None:
    """Full-width digits, ligatures and dots change without being asked."""
    text = "\uff11\uff12\uff13 \ufb01n \u2026 \u0149"
    kept = room.tokenizer([text], normalization="identity")
    assert kept.decode(kept.encode_target([text])[0]) == text
    nfkc = room.tokenizer([text])
    assert nfkc.decode(nfkc.encode_target([text])[0]) == "123 fin ... \u02bcn"


@fault("F19")
def spaces_are_treated_alike_everywhere(room: Room) -> None:
    """Doubled and outer spaces count at training, not at inference."""
    tokenizer = room.tokenizer(["a b"])
    assert tokenizer.encode_source(["  a   b "]) == tokenizer.encode_source(["a b"])
    assert tokenizer.decode(tokenizer.encode_target(["  a   b "])[0]) == "a b"


@fault("F21")
def special_symbols_in_text_are_text(room: Room) -> None:
    """A literal </s> ends the sentence, <pad> is masked."""
    text = "Write </s> to stop, <pad> to fill"
    tokenizer = room.tokenizer([text])
    ids = tokenizer.encode_target([text])[0]
    assert ids[-1] == tokenizer.eos_id
    assert not {tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id} & set(ids[:-1])
    assert tokenizer.decode(ids) == text


@fault("F22")
def a_language_tag_is_one_id(room: Room) -> None:
    """A piece of its own for the space stands between tag and text."""
    pairs = [*NUMBERS, Pair("Hello", "Hallo")]
    tokenizer = Tokenizer.train(pairs, TokenizerConfig(vocab_size=300), ["de", "fr"])
    plain = tokenizer.source.encode(["Hello", "<2de> Hello"])
    assert set(tokenizer.tags) == {"de", "fr"}
    assert tokenizer.encode_source(["Hello"], target_lang="de")[0] == [
        tokenizer.tags["de"],
        *plain[0],
        tokenizer.eos_id,
    ]
    assert tokenizer.tags["de"] not in plain[1], "text is never a tag"


@fault("F23")
def a_vocabulary_that_does_not_suit_the_text(room: Room) -> None:
    """SentencePiece dies, and does not say on which side."""
    few = NUMBERS[:20]
    said = refusal(Tokenizer.train, few, TokenizerConfig(vocab_size=8000))
    assert said.startswith("--tokenizer.vocab-size: got 8000, allowed: at most ")
    many = [Pair("".join(chr(0x4E00 + 50 * i + j) for j in range(50)), "x") for i in range(100)]
    config = TokenizerConfig(vocab_size=1000, byte_fallback=False)
    said = refusal(Tokenizer.train, many, config)
    assert said.startswith("--tokenizer.vocab-size: got 1000, allowed: more than 5")


@fault("F25")
def no_id_is_beyond_the_vocabulary(room: Room) -> None:
    """Ids out of range silently take the last row of the embeddings."""
    tokenizer = room.tokenizer()
    data = room.data(NUMBERS, tokenizer)
    for batch, _ in train_batches(data, Position(), 5):
        for ids in (batch.src_ids, batch.tgt_in_ids, batch.tgt_out_ids):
            assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size


@fault("F26")
def rows_without_a_piece_are_never_chosen(room: Room) -> None:
    """'piece id is out of range': the vocabulary was rounded up."""
    translator = room.translator()
    assert translator.config.model.vocab_size > translator.tokenizer.vocab_size
    for hypotheses in translator.translate_nbest(
        ["one two", "three"], num_hypotheses=3, beam_size=3
    ):
        assert all(isinstance(h.text, str) for h in hypotheses)
    tokenizer = translator.tokenizer
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, -1]) == ""


@fault("F27")
def ids_of_any_kind_are_decoded(room: Room) -> None:
    """decode() raises TypeError on arrays."""
    tokenizer = room.tokenizer()
    ids = tokenizer.encode_target(["81"])[0]
    for given in (ids, np.array(ids, np.int32), jax.numpy.array(ids)):
        assert tokenizer.decode(given) == "81"


@fault("F29")
def each_side_has_its_own_model(room: Room) -> None:
    """Targets are encoded by the source model."""
    pairs = [Pair("abc abd bcd " + "abcd"[i % 4], "wxy xyz wz " + "wxyz"[i % 4]) for i in range(40)]
    config = TokenizerConfig(vocab_size=268, separate=True)
    tokenizer = Tokenizer.train(pairs, config)
    assert tokenizer.source is not tokenizer.target
    tokenizer.save(room.path / "tokenizer")
    for t in (tokenizer, Tokenizer.load(room.path / "tokenizer")):
        assert t.decode(t.encode_target(["wxy wz"])[0]) == "wxy wz"
        own = t.encode_target(["wxy wz"])[0]
        assert len(own) < len(t.encode_source(["wxy wz"])[0]), "the source model has only bytes"
        assert t.fingerprint == tokenizer.fingerprint


@fault("F30")
def the_hash_of_a_tokenizer_is_that_of_its_content(room: Room) -> None:
    """Weights meet the tokenizer of another run of the same size."""
    one, other = room.tokenizer(["abc"] * 50), room.tokenizer(["xyz"] * 50)
    assert one.vocab_size == other.vocab_size and one.fingerprint != other.fingerprint
    assert one.fingerprint == room.tokenizer(["abc"] * 50).fingerprint


# ---- Corpora ------------------------------------------------------------------------------------


@fault("F31")
def a_table_row_without_two_columns(room: Room) -> None:
    """A missing tab shifts columns; a lone quote swallows lines."""
    for row, columns in (("only one", 1), ("x\ty\tz", 3)):
        path = room.write("a.tsv", f'a\tb\n"unbalanced\tb\n{row}\n')
        said = refusal(list, load_splits(DataConfig(train_source=(path,))).train)
        assert said.startswith(f"{path}:3: got {columns} columns")
    path = room.write("a.tsv", 'a\tb\n"unbalanced\tb\n')
    assert list(load_splits(DataConfig(train_source=(path,))).train)[1] == ('"unbalanced', "b")


@fault("F33")
def a_shifted_block_is_noticed(room: Room) -> None:
    """Pairs 40 to 60 of a validation set are shifted by one target line."""
    draw = np.random.default_rng(0)
    source = draw.integers(4, 40, 100)
    lengths = np.stack([source, np.rint(source * draw.normal(1.05, 0.08, 100)).astype(int)], 1)
    assert shifted_stretches(lengths) == []
    lengths[39:60, 1] = lengths[40:61, 1]
    ((first, last),) = shifted_stretches(lengths)
    assert abs(first - 40) <= 3 and abs(last - 60) <= 3
    assert shifted_stretches(np.stack([source, np.roll(source, 1)], 1)) == [(1, 100)]
    assert shifted_stretches(draw.integers(2, 40, (100, 2))) == [], "lengths that say nothing"


@fault("F34")
def bytes_that_are_not_utf8_are_named(room: Room) -> None:
    """UnicodeDecodeError deep in training; files in the code page of the locale."""
    path = room.write("a", b"gut\n" * 16 + b"caf\xe9\n" + b"gut\n" * 13)
    said = refusal(load_splits, DataConfig(train_source=(path,), train_target=(path,)))
    assert said == f"{path}:17: got byte 0xE9, allowed: UTF-8"
    code = """
        import sys
        from transformer_jax.data.files import read_lines
        assert list(read_lines(sys.argv[1])) == ["gr\\u00f6\\u00dfer"]
    """
    command = [sys.executable, "-c", textwrap.dedent(code), room.write("b", "größer\n")]
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)


@fault("F35")
def a_limit_below_the_usual_length(room: Room) -> None:
    """Most of the corpus is silently gone."""
    pairs = [Pair(" ".join(WORDS * 6), f"{i}") for i in range(50)]
    tokenizer = room.tokenizer()
    assert encode_pairs(pairs, tokenizer).lengths[:, 0].min() > 32
    said = refusal(lambda: room.data(pairs, tokenizer, max_source_tokens=32))
    assert "kept 0 of 50 training pairs (0 empty, 50 too long)" in said


# ---- Batches and positions ----------------------------------------------------------------------


@fault("F103")
def hosts_have_the_same_number_of_batches(room: Room) -> None:
    """Hosts with 5 and 4 batches wait for each other at the end of the epoch."""
    tokenizer = room.tokenizer()
    data = room.data(NUMBERS[:17], tokenizer, devices=2, row_multiple=2)
    shares = [
        [x for x in train_batches(data, Position(), 40, (i, 2)) if x[1] <= (0, 17)] for i in (0, 1)
    ]
    assert len(shares[0]) == len(shares[1])
    for one, other in zip(*shares, strict=True):
        assert one[1] == other[1] and one[0].src_ids.shape == other[0].src_ids.shape
    batches = [batch for share in shares for batch, _ in share]
    assert texts_of(batches, tokenizer) == Counter(p.source for p in NUMBERS[:17])


@fault("F105", "F106")
def a_resumed_run_sees_the_rest(room: Room) -> None:
    """After a resume, or with another number of hosts, the first data come again."""
    tokenizer = room.tokenizer()
    data = room.data(NUMBERS, tokenizer, devices=4, row_multiple=4)
    before = [list(train_batches(data, Position(), 3, (i, 4))) for i in range(4)]
    place = before[0][-1][1]
    assert 0 < place.examples < 100
    alone = room.data(NUMBERS, tokenizer, row_multiple=4)
    after = [b for b, p in train_batches(alone, place, 100) if p <= (0, 100)]
    batches = [batch for share in before for batch, _ in share]
    assert texts_of(batches + after, tokenizer) == Counter(p.source for p in NUMBERS)


@fault("F107")
def epochs_differ_and_do_not_depend_on_history(room: Room) -> None:
    """After a resume, the order of epoch 0 comes again."""
    tokenizer = room.tokenizer()
    data = room.data(NUMBERS, tokenizer)
    whole = [(b, p) for b, p in train_batches(data, Position(), 300) if p <= (2, 100)]
    second = [b for b, p in whole if p.epoch == 2]
    alone = [b for b, p in train_batches(data, Position(2, 0), 300) if p <= (2, 100)]
    assert len(second) == len(alone)
    for one, other in zip(second, alone, strict=True):
        np.testing.assert_array_equal(one.src_ids, other.src_ids)
    first = np.concatenate([b.src_ids.ravel() for b, p in whole if p.epoch == 0])
    again = np.concatenate([b.src_ids.ravel() for b in second])
    assert len(first) != len(again) or (first != again).mean() > 0.3


@fault("F114")
def rows_suit_the_devices(room: Room) -> None:
    """'dimension 0 should be divisible by 4, but is 19'."""
    tokenizer = room.tokenizer()
    encoded = encode_pairs(NUMBERS[:19], tokenizer)
    batches = list(eval_batches(encoded, 10_000, 4))
    assert all(len(batch.src_ids) % 4 == 0 for batch in batches)
    assert texts_of(batches, tokenizer) == Counter(p.source for p in NUMBERS[:19])
    said = refusal(lambda: room.data(NUMBERS, tokenizer, devices=64))
    assert said.startswith("--data.global-batch-tokens: got 160, allowed: at least ")


@fault("F115")
def no_pair_is_dropped_to_make_shapes_fit(room: Room) -> None:
    """A test set of 3,003 is cut to 3,000."""
    tokenizer = room.tokenizer()
    pairs = [NUMBERS[i % 100] for i in range(3003)]
    batches = eval_batches(encode_pairs(pairs, tokenizer), 32 * 40, 8)
    assert sum(texts_of(batches, tokenizer).values()) == 3003


@fault("F117")
def shapes_are_few_and_told(room: Room) -> None:
    """Every length compiles another program."""
    tokenizer = room.tokenizer()
    for fields in ({"pairs_per_row": 1}, {}, {"batching": "packed"}):
        data = room.data(NUMBERS, tokenizer, **fields)
        shapes = {
            (batch.src_ids.shape, batch.tgt_out_ids.shape)
            for batch, _ in train_batches(data, Position(), 60)
        }
        assert len(shapes) <= 3 and len(shapes) <= len(data.report.split("shapes ")[1].split())


@fault("F118")
def reading_does_not_keep_what_it_read(room: Room) -> None:
    """The host's memory is used up by a long file."""
    path = room.write("a", "x\n" * 10)
    lines = read_lines(path)
    assert next(lines) == "x" and iter(lines) is lines, "an iterator, not a list"
    given = load_splits(DataConfig(train_source=(path,), train_target=(path,))).train
    assert not any(isinstance(part.pairs, list) for part in given.parts)


@fault("F121")
def shards_are_disjoint_and_complete(room: Room) -> None:
    """Workers read the same shards."""
    tokenizer = room.tokenizer()
    data = room.data(NUMBERS, tokenizer, devices=2)
    everything = Counter(p.source for p in NUMBERS)
    orders = []
    for epoch in (0, 1):
        start, end = Position(epoch, 0), (epoch, 100)
        shares = [
            [b for b, p in train_batches(data, start, 60, (i, 2)) if p <= end] for i in (0, 1)
        ]
        one, other = (texts_of(share, tokenizer) for share in shares)
        assert not one & other and one + other == everything and one and other
        orders.append(one)
    assert orders[0] != orders[1]


@fault("F139")
def local_files_come_first_and_no_network_is_said(room: Room) -> None:
    """The first run dies in a download."""
    config = DataConfig(
        source="tfds", tfds_name="wmt14_translate/de-en", tfds_dir=str(room.path / "tfds")
    )
    real = prepared._network
    prepared._network = lambda: False
    try:
        said = refusal(load_splits, config)
    finally:
        prepared._network = real
    assert "download_and_prepare()" in said and "on a machine with network" in said


@fault("F38")
def filler_rows_are_empty(room: Room) -> None:
    """A row that is all padding has no weight and no segment that could be attended to."""
    encoded = encode_pairs(NUMBERS[:2], room.tokenizer())
    batch = collate(encoded, Bucket(5, 40, 20), np.array([0, 1]))
    for array in batch[:5]:
        assert not array[2:].any()


@pytest.mark.parametrize("name", ROWS)
def test_fault(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bug: see the docstring of the row."""
    ROWS[name](Room(tmp_path, caplog))
