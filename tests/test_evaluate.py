"""Scores: those of the sacrebleu command on the same files, over every sentence."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.config import ConfigError, MeshConfig, ModelConfig
from transformer_jax.data.batching import Bucket, Encoded, collate
from transformer_jax.data.tokenizer import EOS
from transformer_jax.evaluate import text_quality, token_loss, translation_quality
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh
from transformer_jax.train.step import compile_eval_step
from transformer_jax.types import Metrics, Pair, Translation

pytestmark = pytest.mark.usefixtures("quick_compilation")

REFERENCES = [
    "Die Datei wurde nicht gefunden.",
    'Er sagte: "Das ist gut", und ging.',
    "Am 3.5.2021 waren es 1,5 km.",
    "Straße, Größe, Übergröße!",
    "ein Satz ohne Punkt",
]
HYPOTHESES = [
    "Die Datei wurde gefunden.",
    'Er sagte: "Es ist gut" und ging .',
    "Am 3. Mai 2021 waren es 1,5 Kilometer.",
    "Strasse, Größe, Übergröße!",
    "ein Satz ohne Punkt",
]
CHINESE = (
    ["我爱北京天安门。", "今天天气很好,我们去公园。"],
    ["我爱天安门。", "今天天气好,我们去了公园。"],
)


def command(
    hypotheses: Sequence[str], references: Sequence[str], directory: Path, *options: str
) -> list[dict]:
    """BLEU and chrF by the sacrebleu command, from files."""
    for name, lines in (("hyp.txt", hypotheses), ("ref.txt", references)):
        (directory / name).write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))
    files = [str(directory / "ref.txt"), "-i", str(directory / "hyp.txt")]
    asked = ["-m", "bleu", "chrf", "--format", "json", "-w", "4", *options]
    result = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *files, *asked],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


# ---- Text ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hypotheses", "references", "lang", "options"),
    [
        (HYPOTHESES, REFERENCES, "de", ()),
        (HYPOTHESES, REFERENCES, "fr", ()),
        (REFERENCES, REFERENCES, "de", ()),
        (["", *HYPOTHESES[1:]], REFERENCES, "de", ()),
        (HYPOTHESES, ["", *REFERENCES[1:]], "de", ()),
        (["x"] * 5, REFERENCES, "de", ()),
        (CHINESE[1], CHINESE[0], "zh", ("-tok", "zh")),
    ],
    ids=["de", "fr", "perfect", "empty hypothesis", "empty reference", "nothing right", "zh"],
)
def test_scores_are_those_of_the_command(
    tmp_path: Path,
    hypotheses: list[str],
    references: list[str],
    lang: str,
    options: tuple[str, ...],
):
    """Bug: F123, F125, F127, F130, F131: BLEU over pieces, another tokenizer, on a scale of 0 to 1,
    or over fewer pairs because one side is empty."""
    quality = text_quality(hypotheses, references, lang)
    bleu, chrf = command(hypotheses, references, tmp_path, *options)
    assert quality.bleu == pytest.approx(bleu["score"], abs=0.005)
    assert quality.chrf == pytest.approx(chrf["score"], abs=0.005)
    assert quality.signature == bleu["signature"]
    assert quality.sentences == len(references)


def test_a_perfect_translation_scores_100():
    """Bug: F130: 1.0 instead of 100."""
    quality = text_quality(REFERENCES, REFERENCES, "de")
    assert quality.bleu == pytest.approx(100) and quality.chrf == pytest.approx(100)
    assert quality.exact == 100
    assert text_quality(HYPOTHESES, REFERENCES, "de").exact == 20


@pytest.mark.parametrize(
    ("lang", "tokenizer"),
    [
        *[("zh", "zh"), ("zh-CN", "zh"), ("zh_Hant", "zh"), ("zho_Hans", "zh"), ("cmn", "zh")],
        *[("de", "13a"), ("pt_BR", "13a"), ("deu_Latn", "13a")],
    ],
)
def test_the_language_chooses_the_tokenizer_and_says_so(lang: str, tokenizer: str):
    """Bug: F127: Chinese is scored in words, and comes out 20 points off."""
    assert f"|tok:{tokenizer}|" in text_quality(["a"], ["a"], lang).signature
    by_lang = [text_quality(CHINESE[1], CHINESE[0], lang).bleu for lang in ("zh", "de")]
    assert by_lang[0] > by_lang[1] + 20


@pytest.mark.parametrize("lang", ["ja", "jpn_Jpan"])
def test_a_language_without_its_tokenizer_is_one_line(lang: str, monkeypatch: pytest.MonkeyPatch):
    """Bug: F127: Japanese without MeCab ends in a traceback, or in another tokenizer's score."""
    monkeypatch.setitem(sys.modules, "MeCab", None)  # as if not installed
    monkeypatch.delitem(sys.modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    with pytest.raises(ConfigError) as error:
        text_quality(["a"], ["a"], lang)
    said = str(error.value)
    assert said.startswith(f"--data.target-lang: got {lang!r}: ") and "pip install" in said
    assert "\n" not in said


def test_mismatched_or_empty_sets_are_errors():
    """Bug: F131: an empty set scores 0.0; zip() stops at the shorter side."""
    with pytest.raises(ConfigError, match="no pairs"):
        text_quality([], [], "de")
    with pytest.raises(ConfigError, match="got 4 for 5"):
        text_quality(HYPOTHESES[:4], REFERENCES, "de")


def test_inputs_are_not_changed():
    """Bug: sacreBLEU gets the caller's lists, and strips their lines."""
    hypotheses, references = list(HYPOTHESES), list(REFERENCES)
    quality = text_quality(hypotheses, references, "de")
    assert (hypotheses, references) == (HYPOTHESES, REFERENCES)
    assert quality.hypotheses == HYPOTHESES and quality.hypotheses is not hypotheses


class Parrot:
    """A translator with known answers: none for a blank text, unfinished ones for some.

    It cannot score given targets: an evaluation that forced the references (F81) would fail.
    """

    def __init__(self) -> None:
        self.options: dict = {}

    def translate_nbest(self, texts: Sequence[str], **options) -> list[list[Translation]]:
        self.options = options
        answers = []
        for text in texts:
            pieces = text.split()
            finished = not text.endswith("!")
            answers.append(
                [Translation(text, pieces, -1.0, -1.0, finished)] if text.strip() else []
            )
        return answers


def test_blank_sources_count_and_options_reach_the_search():
    """Bug: F131: pairs with a blank source are left out; F125: validation searches otherwise."""
    pairs = [Pair(text, text) for text in REFERENCES] + [Pair(" ", "etwas")]
    parrot = Parrot()
    quality = translation_quality(parrot, pairs, "de", beam_size=3)  # type: ignore[arg-type]
    assert quality.sentences == 6 and quality.hypotheses == [*REFERENCES, ""]
    assert quality.exact == pytest.approx(500 / 6)
    assert parrot.options == {"beam_size": 3}
    expected = text_quality([*REFERENCES, ""], [pair.target for pair in pairs], "de")
    assert (quality.bleu, quality.chrf) == (expected.bleu, expected.chrf)
    assert quality.tokens_per_sec > 0 and math.isnan(expected.tokens_per_sec)


# ---- Token loss ---------------------------------------------------------------------------------

MODEL = Model(
    ModelConfig(vocab_size=24, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1)
)


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.jit(MODEL.init)(jax.random.key(0))


def encode(count: int) -> Encoded:
    draw = np.random.default_rng(count)
    sides = []
    for _ in (0, 1):
        sentences = [[*draw.integers(4, 24, draw.integers(1, 12)), EOS] for _ in range(count)]
        sides += [np.concatenate(sentences).astype(np.int32)]
        sides += [np.cumsum([0, *map(len, sentences)])]
    return Encoded(*sides)


def test_token_loss_does_not_depend_on_the_batches(params: dict):
    """Bug: F49, F103, F115: a mean of the batches' means; a batch that is dropped, or filler that
    counts, on several devices."""
    encoded = encode(23)
    # By hand: one pair at a time, in float64, from the logits.
    nll = hits = tokens = 0.0
    logits_of = jax.jit(MODEL.apply)
    for i in range(23):
        b = collate(encoded, Bucket(1, 13, 13), np.array([i]))
        logits = logits_of(params, b.src_ids, b.tgt_in_ids, b.src_segments, b.tgt_segments)
        for z, target, real in zip(logits[0], b.tgt_out_ids[0], b.tgt_segments[0], strict=True):
            if real:
                z = np.asarray(z, np.float64)
                nll += np.log(np.exp(z - z.max()).sum()) + z.max() - z[target]
                hits += int(z.argmax() == target)
                tokens += 1
    for batch_tokens, count in ((13, 1), (10_000, 1), (40, 8)):
        mesh = make_mesh(MeshConfig(), jax.devices()[:count])
        got = token_loss(compile_eval_step(MODEL, mesh), params, encoded, batch_tokens, mesh)
        assert got["tokens"] == tokens == encoded.tgt_ends[-1]
        assert got["loss"] == pytest.approx(nll / tokens, rel=1e-6)
        assert got["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
        assert got["teacher_forced_accuracy"] == pytest.approx(hits / tokens)


def test_token_loss_of_nothing_is_an_error(params: dict):
    """Bug: F131: an empty validation set divides by zero, or has loss 0."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    empty = Encoded(*(np.zeros(n, np.int32) for n in (0, 1, 0, 1)))
    with pytest.raises(ConfigError, match="no pairs"):
        token_loss(compile_eval_step(MODEL, mesh), params, empty, 100, mesh)


def test_a_hopeless_model_has_a_finite_perplexity():
    """Bug: OverflowError of math.exp ends a run at its first evaluation."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step = lambda params, batch: Metrics(*np.array([0, 5e5, 0, 5, 0, 1], np.float32))
    got = token_loss(step, None, encode(1), 100, mesh)
    assert got["loss"] == 1e5 and math.isfinite(got["perplexity"])


def test_names_do_not_promise_bleu_for_teacher_forcing():
    """Bug: F123: token accuracy under a name that reads like a score of translations."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    step = lambda params, batch: Metrics(*np.ones(6, np.float32))
    got = token_loss(step, None, encode(1), 100, mesh)
    assert set(got) == {"loss", "perplexity", "teacher_forced_accuracy", "tokens"}
