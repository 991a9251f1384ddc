"""Strings in, strings out: every line answered, in its place, whatever stands beside it."""

import concurrent.futures
import logging

import jax
import numpy as np
import pytest

from transformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TokenizerConfig,
)
from transformer_jax.data.tokenizer import EOS, START, Tokenizer
from transformer_jax.decode import engine as engine_module
from transformer_jax.decode.engine import Hypothesis, Request
from transformer_jax.decode.search import BeamSearch
from transformer_jax.decode.trained import Trained
from transformer_jax.decode.translator import Translator
from transformer_jax.model import Model
from transformer_jax.types import SamplingOptions, Translation

PAIRS = [
    ("the cat sees the dog", "die Katze sieht den Hund"),
    ("a dog eats 12 apples", "ein Hund frisst 12 Äpfel"),
    ("the bird sings", "der Vogel singt"),
    ("cats and dogs run home", "Katzen und Hunde laufen heim"),
    ("no bird eats a cat", "kein Vogel frisst eine Katze"),
]
SHORT = ["a cat", "the dog", "12 dogs", "no cat", "Hund", "a dog", "ein Hund", "die Katze"]
BLANK = ["", " ", "\t", " \t ", "\u00a0", "\u3000", "\u200b", "\ufeff", "\n"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=305))


def random_params(model: Model, favoured):
    """Parameters of a model that only says favoured pieces, sometimes EOS, according to source.

    The seeds are such that the tests meet hypotheses of several lengths, finished and not.
    """
    rng = np.random.default_rng(2)

    def draw(path, leaf):
        spread = 0.1 if leaf.ndim == 1 else leaf.shape[0] ** -0.5
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, model.abstract_params())
    rng, width = np.random.default_rng(102), model.config.d_model
    direction = np.full(width, width**-0.5, np.float32)
    params["decoder_0"]["feed_forward_norm"]["bias"] += 2 * direction
    params["decoder_0"]["cross_attention"]["out"] *= 8
    for name, spread in (("embedding", 0.6), ("source_embedding", 0.6), ("output_embedding", 0.5)):
        params[name] = rng.normal(0, spread, params[name].shape).astype(np.float32)
    params["output_embedding"] -= 5 * direction
    params["output_embedding"][favoured] += 5 * direction
    params["output_embedding"][EOS] += 6 * direction
    return params


@pytest.fixture(scope="module")
def translator(tokenizer) -> Translator:
    """A table with 13 more rows than the tokenizer has pieces."""
    config = Config(
        model=ModelConfig(
            vocab_size=tokenizer.vocab_size + 13,
            d_model=16,
            d_ff=24,
            num_heads=2,
            encoder_layers=1,
            decoder_layers=1,
            tied_embeddings="none",
        ),
        data=DataConfig(max_source_tokens=64),
        decode=DecodeConfig(beam_size=3, max_extra_tokens=4),
    )
    ids = range(START + 1, tokenizer.vocab_size)
    # Pieces that begin a word: their texts are cut into the same pieces again.
    words = [i for i in ids if len(piece := tokenizer.pieces([i])[0]) > 1 and piece[0] == "▁"]
    assert len(words) > 5
    return Translator(random_params(Model(config.model), words), config, tokenizer)


class Stub:
    """Stands for the engine: records the sources, answers with given ids."""

    def __init__(self) -> None:
        self.sources: list[list[int]] = []
        self.answer = None

    def decode(self, search, requests, batch_tokens):
        sources = [request.source for request in requests]
        self.sources += sources
        self.search, self.requests = search, requests
        answers = [self.answer(ids) if self.answer else ids for ids in sources]
        return [[Hypothesis(list(ids), -1.0, -0.5, True)] for ids in answers]


@pytest.fixture()
def stub(translator, monkeypatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(translator, "_engine", stub)
    return stub


# --- Every line is answered in its place. ---


@pytest.mark.parametrize("number", [1, 5, 8])
def test_as_many_results_as_sentences(translator, number):
    """Bug (F77): the last, underfilled batch loses or repeats a sentence."""
    alone = [translator.translate([text])[0] for text in SHORT[:number]]
    assert translator.translate(SHORT[:number]) == alone
    assert number == 1 or len(set(alone)) > 1


def test_order_and_duplicates(translator):
    """Bug (F75): results come out by length; a repeated line is answered once."""
    texts = ["12 dogs", "a", "die Katze", "a cat", "a", "12 dogs", "ein Hund", "no cat"]
    lengths = [len(ids) for ids in translator.tokenizer.encode_source(texts)]
    assert lengths != sorted(lengths)
    found = translator.translate(texts)
    assert found == translator.translate(texts[::-1])[::-1]
    assert found[0] == found[5]
    assert found[1] == found[4]
    assert len(set(found)) > 3
    nbest = translator.translate_nbest(texts)
    assert [some[0].text for some in nbest] == found


def test_a_sentence_alone_and_in_a_batch_of_64(translator):
    """Bug (F41, F74): the text, or its score, depends on neighbours, padding or batch size."""
    rng = np.random.default_rng(0)
    words = " ".join(SHORT).split()
    texts = [" ".join(rng.choice(words, 1 + i % 4)) for i in range(64)]
    lengths = [len(ids) for ids in translator.tokenizer.encode_source(texts)]
    assert min(lengths) <= 4 and 8 < max(lengths) <= 16  # two shapes
    together = translator.translate_nbest(texts)
    assert len({some[0].text for some in together}) > 16
    for i in range(64):
        (alone,) = translator.translate_nbest([texts[i]])
        assert [h.text for h in alone] == [h.text for h in together[i]]
        assert [h.pieces for h in alone] == [h.pieces for h in together[i]]
        for a, b in zip(alone, together[i], strict=True):
            np.testing.assert_allclose(a.log_prob, b.log_prob, rtol=1e-5, atol=1e-5)
            assert a.finished is b.finished


def test_blank_lines_are_answered_without_the_model(translator, stub):
    """Bugs (F1, F2, F3): a blank line crashes, shifts its neighbours, or gets an invented text."""
    texts = ["the cat", "", " ", "a dog", *BLANK, "the bird"]
    found = translator.translate(texts)
    assert found == ["the cat", "", "", "a dog", *[""] * len(BLANK), "the bird"]
    assert len(stub.sources) == 3
    assert [len(some) for some in translator.translate_nbest(["", "a cat", "\t"])] == [0, 1, 0]


def test_nothing_but_blank_lines_calls_no_program(translator, monkeypatch):
    """Bug (F2): an empty batch reaches the model."""

    def refuse(*arguments, **options):
        raise AssertionError("the model was called")

    monkeypatch.setattr(engine_module, "_start", refuse)
    assert translator.translate(BLANK) == [""] * len(BLANK)
    assert translator.translate([]) == []
    assert translator.translate_nbest(BLANK) == [[]] * len(BLANK)
    with pytest.raises(AssertionError, match="was called"):
        translator.translate(["a cat"])


def test_white_space_is_blank_even_where_it_makes_pieces(translator, monkeypatch):
    """Bug (F3): with the identity normalization spaces are pieces, and get a translation."""
    config = TokenizerConfig(vocab_size=305, normalization="identity")
    spaces = Tokenizer.train(PAIRS, config)
    assert len(spaces.encode_source(["  "])[0]) > 1
    monkeypatch.setattr(translator, "tokenizer", spaces)
    assert translator.translate_nbest([" ", "\t", "\u3000", "  "]) == [[]] * 4


# --- What a result says. ---


def test_log_prob_of_n_best_is_that_of_score(translator):
    """Bug (F67): EOS counts in one of the two only; another scale; another text than pieces."""
    found = translator.translate_nbest(SHORT, num_hypotheses=3)
    assert [len(some) for some in found] == [3] * len(SHORT)
    encode = lambda text: translator.tokenizer.encode_target([text])[0]
    pairs = [
        (source, hypothesis)
        for source, some in zip(SHORT, found, strict=True)
        for hypothesis in some
        if hypothesis.finished
        and translator.tokenizer.pieces(encode(hypothesis.text)) == hypothesis.pieces
    ]
    assert len(pairs) > 8 and any(len(h.pieces) > 2 for _, h in pairs)
    scores = translator.score([s for s, _ in pairs], [h.text for _, h in pairs])
    for (_, hypothesis), score in zip(pairs, scores, strict=True):
        assert score.num_tokens == len(score.token_log_probs) == len(hypothesis.pieces) + 1
        np.testing.assert_allclose(score.log_prob, hypothesis.log_prob, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sum(score.token_log_probs), score.log_prob, rtol=1e-5)
        penalty = ((5 + score.num_tokens) / 6) ** 0.6
        np.testing.assert_allclose(hypothesis.score, hypothesis.log_prob / penalty, rtol=1e-5)


def test_n_best_is_distinct_and_best_first(translator):
    """Bug (F71): one hypothesis several times; finished and unfinished ones mixed."""
    for some in translator.translate_nbest(SHORT, num_hypotheses=3):
        assert len({tuple(h.pieces) for h in some}) == 3
        finished = [h.finished for h in some]
        assert finished == sorted(finished, reverse=True)
        for kind in (True, False):
            scores = [h.score for h in some if h.finished is kind]
            assert scores == sorted(scores, reverse=True)
        assert all(isinstance(h, Translation) and isinstance(h.log_prob, float) for h in some)


def test_ids_outside_the_tokenizer_are_never_chosen(translator, tokenizer):
    """Bug (F26): a padded row of the table wins, and decoding fails or drops it silently."""
    beyond = list(range(tokenizer.vocab_size, tokenizer.vocab_size + 13))
    params = random_params(translator.model, beyond)
    params["output_embedding"][beyond] *= 4
    other = Translator(params, translator.config, tokenizer)
    requests = [Request(ids, len(ids) + 4) for ids in tokenizer.encode_source(SHORT)]
    found = other._engine.decode(BeamSearch(3, EOS, 0.6), requests, 4096)
    ids = {i for some in found for h in some for i in h.ids}
    assert ids and max(ids) < tokenizer.vocab_size
    assert len(other.translate(SHORT)) == len(SHORT)


LINE_BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def test_no_hypothesis_holds_a_line_break(translator, tokenizer, stub):
    """Bug (F5, F6): bytes of a line break become a second line of the output file."""
    byte = {f"<0x{n:02X}>": n for n in range(256)}
    ids = {byte[p]: i for i in range(START + 1, 305) if (p := tokenizer.pieces([i])[0]) in byte}
    assert len(ids) == 256
    cat = tokenizer.encode_target(["cat"])[0][:-1]
    for text in [*LINE_BREAKS, "\r\n", "\n\n\u2029"]:
        inside = [ids[n] for n in text.encode()]
        stub.answer = lambda _, inside=inside: [*inside, *cat, *inside, *cat, *inside, EOS]
        ((hypothesis,),) = translator.translate_nbest(["a dog"])
        assert hypothesis.text.split() == ["cat", "cat"], ascii(text)
        assert hypothesis.text.splitlines() == [hypothesis.text]
        assert translator.translate(["a dog"]) == [hypothesis.text]


def test_unfinished_bytes_are_text(translator, tokenizer, stub):
    """Bug (F17): bytes cut by the limit come out as <0xE7> or raise."""
    pieces = {tokenizer.pieces([i])[0]: i for i in range(START + 1, 305)}
    han = [pieces[f"<0x{n:02X}>"] for n in "爿".encode()]
    stub.answer = lambda _: [*han, EOS]
    assert translator.translate(["a dog"]) == ["爿"]
    stub.answer = lambda _: han[:2]
    (text,) = translator.translate(["a dog"])
    assert "<0x" not in text
    assert not text.strip("\ufffd")


# --- Mistakes, said. ---


def test_parameters_that_are_not_finite_are_an_error(translator, tokenizer):
    """Bug (F82): a broken checkpoint translates everything into nothing."""
    params = jax.tree.map(lambda x: x, translator.params)
    kernel = params["encoder_0"]["feed_forward"]["inner"] = params["encoder_0"]["feed_forward"][
        "inner"
    ].copy()
    kernel[0, 0] = np.nan
    broken = Translator(params, translator.config, tokenizer)
    with pytest.raises(FloatingPointError, match="not finite"):
        broken.translate(SHORT)
    with pytest.raises(FloatingPointError, match="not finite"):
        broken.score(SHORT, SHORT)


def test_an_over_long_source_is_cut_and_said(translator, tokenizer, stub, caplog):
    """Bug (F11): the run stops at the first long line, or the line is cut in silence."""
    texts = ["a cat", "the cat sees the dog and the bird", "", "a dog"]
    tokens = len(tokenizer.encode_source(texts)[1])
    assert tokens > 8
    with caplog.at_level(logging.WARNING, "transformer_jax"):
        found = translator.translate_nbest(texts, max_source_tokens=8, first_line=11)
    (record,) = caplog.records
    assert record.getMessage() == f"line 12: cut from {tokens} to 8 tokens"
    assert [[h.truncated_source for h in some] for some in found] == [[False], [True], [], [False]]
    ids = tokenizer.encode_source(texts)
    assert stub.sources == [ids[0], [*ids[1][:7], EOS], ids[3]]


def test_the_limit_of_the_source_is_that_of_training(translator, stub, caplog):
    """Bug: without a keyword nothing is cut, and positions go where no training went."""
    longest = translator.config.data.max_source_tokens
    with caplog.at_level(logging.WARNING, "transformer_jax"):
        translator.translate(["cat " * 200])
    assert [len(ids) for ids in stub.sources] == [longest]
    assert "line 1: cut from" in caplog.text


def test_one_string_is_not_a_list(translator):
    """Bug: a string is a sequence of strings, so each letter is translated."""
    for call in (
        lambda: translator.translate("the cat"),
        lambda: translator.translate_nbest("the cat"),
        lambda: translator.score("the cat", ["die Katze"]),
        lambda: translator.score(["the cat"], "die Katze"),
    ):
        with pytest.raises(TypeError, match="got one string, allowed: a list of strings"):
            call()


def test_impossible_requests_are_refused_in_one_line(translator):
    """Bug: silently fewer hypotheses or pairs than were asked for."""
    with pytest.raises(ConfigError, match="num_hypotheses: got 4, allowed: 1 to 3"):
        translator.translate_nbest(["a cat"], num_hypotheses=4)
    with pytest.raises(ConfigError, match="num_hypotheses: got 0"):
        translator.translate_nbest(["a cat"], num_hypotheses=0)
    for name, value, least in (
        ("beam_size", 0, 1),
        ("max_extra_tokens", -1, 0),
        ("max_source_tokens", 0, 2),
        ("max_source_tokens", 1, 2),
    ):
        with pytest.raises(ConfigError, match=f"{name}: got {value}, allowed: {least} or more"):
            translator.translate(["a cat"], **{name: value})
    with pytest.raises(ConfigError, match="targets: got 1, allowed: 2"):
        translator.score(["a cat", "a dog"], ["eine Katze"])
    with pytest.raises(ConfigError, match="allowed: at least"):
        small = ModelConfig(vocab_size=translator.tokenizer.vocab_size - 1)
        Translator({}, Config(model=small), translator.tokenizer)


def test_keywords_override_the_config_and_zero_is_a_value(translator, stub):
    """Bug: `or` takes 0 for absent, so length_penalty=0 becomes 0.6."""
    translator.translate(["a cat"], length_penalty=0, max_extra_tokens=0, beam_size=1)
    assert (stub.search.beam_size, stub.search.length_penalty) == (1, 0)
    assert stub.requests[0].limit == len(stub.requests[0].source)
    translator.translate(["a cat"])
    assert (stub.search.beam_size, stub.search.length_penalty) == (3, 0.6)
    assert stub.requests[0].limit == len(stub.requests[0].source) + 4
    assert stub.search.num_hypotheses == 1


# --- Prefixes, draws, ensembles, attention. ---


def test_a_prefix_begins_the_translation(translator):
    """Bug: the prefix is scored but not kept, or given to the wrong sentence."""
    texts = ["a cat", "the dog sees a bird", "a bird"]
    prefix = ["das", "", "die Katze"]
    found = translator.translate_nbest(texts, prefix=prefix, num_hypotheses=2)
    for text, begin, some in zip(texts, prefix, found, strict=True):
        for h in some:
            assert h.text.startswith(begin)
        (score,) = translator.score([text], [some[0].text])
        if some[0].finished and translator.tokenizer.encode_target([some[0].text])[0][:-1]:
            ids = translator.tokenizer.encode_target([some[0].text])[0]
            if len(ids) == score.num_tokens == len(some[0].pieces) + 1:
                assert some[0].log_prob == pytest.approx(score.log_prob, abs=1e-3)
    with pytest.raises(ConfigError, match="prefix: got 1, allowed: 3"):
        translator.translate(texts, prefix=["das"])


def test_draws_follow_the_seed_of_their_line(translator):
    """Bug: a draw depends on the batch, on the order, or on nothing."""
    options = {"sampling": {"temperature": 1.0, "top_k": 20, "seed": 3}, "num_hypotheses": 3}
    together = translator.translate_nbest(SHORT, **options)
    again = translator.translate_nbest(SHORT, **options, batch_tokens=8)
    assert [[h.text for h in some] for some in together] == [
        [h.text for h in some] for some in again
    ]
    alone = translator.translate_nbest(SHORT[2:3], **options, first_line=3)
    assert [h.text for h in alone[0]] == [h.text for h in together[2]]
    other = translator.translate_nbest(SHORT, sampling=SamplingOptions(seed=99), num_hypotheses=3)
    assert other != together
    for name, value in (("temperature", -1), ("top_p", 0), ("top_k", -1), ("min_p", 2)):
        with pytest.raises(ConfigError, match=f"sampling.{name}: got {value}"):
            translator.translate(["a cat"], sampling={name: value})
    with pytest.raises(ConfigError, match="sampling: got 'heat', allowed: temperature"):
        translator.translate(["a cat"], sampling={"heat": 1})


def test_the_hypothesis_most_like_the_others_comes_first(translator, stub):
    """Bug: the least alike, or the likeliest, is chosen."""
    texts = ["die Katze", "die Katze", "die Maus", "ein Vogel"]
    ids = [translator.tokenizer.encode_target([t])[0] for t in texts]
    order = [3, 2, 0, 1]
    stub.decode = lambda search, requests, tokens: [
        [Hypothesis(ids[i], -float(n), -float(n), True) for n, i in enumerate(order)]
    ]
    found = translator.translate_nbest(
        ["x y"], choose="mbr", sampling=SamplingOptions(), num_hypotheses=4
    )
    assert [h.text for h in found[0]] == texts


def test_an_ensemble_needs_one_tokenizer(translator, tokenizer):
    """Bug: ids of another tokenizer vote."""
    mate = Trained(translator.params, translator.config, tokenizer, None)
    arguments = translator.params, translator.config, tokenizer
    both = Translator(*arguments, others=[mate])
    assert both.translate(SHORT) == translator.translate(SHORT)
    stranger = Tokenizer.train(PAIRS, TokenizerConfig(vocab_size=303))
    with pytest.raises(ConfigError, match="different tokenizers"):
        Translator(*arguments, others=[mate._replace(tokenizer=stranger)])


def test_attention_is_that_of_each_target_token(translator):
    """Bug: weights of padding, of another layer, or shifted by one."""
    (some,) = translator.translate_nbest(["the cat sees the dog"], attention=True)
    weights = some[0].attention
    source = translator.tokenizer.encode_source(["the cat sees the dog"])[0]
    assert weights.shape == (len(some[0].pieces) + some[0].finished, len(source))
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    assert translator.translate_nbest(["a cat"])[0][0].attention is None


def test_a_long_text_in_parts_loses_nothing(translator, caplog):
    """Bugs: parts go to another line, the rest behind the first is dropped, each has the prefix."""
    long = "the cat sees the dog. a bird sees the cat, the dog sees a bird. a cat"
    texts = ["a bird", long, "", "the dog"]
    options = {"max_source_tokens": 16, "split": True}
    parts = ["the cat sees the dog.", "a bird sees the cat,", "the dog sees a bird.", "a cat"]
    fits = [len(ids) <= 16 for ids in translator.tokenizer.encode_source([*parts, long])]
    assert fits == [True] * 4 + [False]
    found = translator.translate_nbest(texts, **options)
    alone = translator.translate_nbest(parts)
    assert found[1][0].text == " ".join(h.text for (h,) in alone)
    assert found[1][0].log_prob == pytest.approx(sum(h.log_prob for (h,) in alone), abs=1e-3)
    assert not found[1][0].truncated_source and not caplog.records
    assert [h[0].text if h else "" for h in (found[0], found[2], found[3])] == (
        translator.translate(["a bird", "", "the dog"])
    )
    (begun,) = translator.translate([long], prefix=["das"], **options)
    assert begun.startswith("das") and begun.endswith(alone[-1][0].text)
    with pytest.raises(ConfigError, match="attention: got True with split"):
        translator.translate_nbest(texts, attention=True, split=True)


def test_threads_share_one_translator(translator):
    """Bug: two calls at once mix their batches, or one's state is given away by the other."""
    texts = [SHORT, SHORT[::-1], SHORT[2:5], SHORT * 3]
    expected = [translator.translate(some) for some in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(translator.translate, texts * 4))
    assert found == expected * 4
