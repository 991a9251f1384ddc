"""Quality of a model on held-out pairs: token loss, and sacreBLEU and chrF of real translations."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import sacrebleu
from jax.sharding import Mesh

from transformer_jax.config import ConfigError, base_language
from transformer_jax.data.batching import Encoded
from transformer_jax.data.pipeline import eval_batches
from transformer_jax.decode.translator import Translator
from transformer_jax.sharding import batch_shards, put_batch
from transformer_jax.types import Batch, Metrics, Pair


class Quality(NamedTuple):
    """Scores of translations against references, on the 0-100 scale."""

    bleu: float
    signature: str  # of sacreBLEU: tokenizer, case, version
    chrf: float
    exact: float  # percentage of translations equal to the reference
    sentences: int
    tokens_per_sec: float  # target tokens
    hypotheses: list[str]


def token_loss(
    step: Callable[[Any, Batch], Metrics],
    params: Any,
    encoded: Encoded,
    batch_tokens: int,
    mesh: Mesh,
) -> dict[str, float]:
    """Teacher-forced loss in nats per target token, perplexity and token accuracy.

    Sums over all pairs are divided once, so batch size and padding do not matter.
    """
    total = None
    for batch in eval_batches(encoded, batch_tokens, batch_shards(mesh)):
        metrics = jax.device_get(step(params, put_batch(mesh, batch)))
        total = metrics if total is None else jax.tree.map(np.add, total, metrics)
    if total is None:
        raise ConfigError("evaluation: got no pairs, allowed: at least one")
    loss = float(total.nll / total.tokens)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "teacher_forced_accuracy": float(total.correct / total.tokens),
        "tokens": float(total.tokens),
    }


def translation_quality(
    translator: Translator, pairs: Sequence[Pair], target_lang: str, **options: Any
) -> Quality:
    """Translate the sources freely and score the text with sacreBLEU and chrF."""
    start = time.perf_counter()
    found = translator.translate_nbest([pair.source for pair in pairs], **options)
    seconds = time.perf_counter() - start
    tokens = sum(len(h[0].pieces) + h[0].finished for h in found if h)
    hypotheses = [h[0].text if h else "" for h in found]
    quality = text_quality(hypotheses, [pair.target for pair in pairs], target_lang)
    return quality._replace(tokens_per_sec=tokens / seconds)


def bleu_of(target_lang: str) -> sacrebleu.BLEU:
    """sacreBLEU with the tokenizer of a language, such as zh, zh-CN or zho_Hans.

    Raises:
        ConfigError: the tokenizer of the language is not installed (ja and ko need MeCab).
    """
    try:
        return sacrebleu.BLEU(trg_lang=base_language(target_lang))
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"--data.target-lang: got {target_lang!r}: {said}") from None


def text_quality(hypotheses: Sequence[str], references: Sequence[str], target_lang: str) -> Quality:
    """Corpus BLEU and chrF as the sacrebleu command computes them; the language chooses its
    tokenizer (zh, ja-mecab, ko-mecab, else 13a)."""
    if not references:
        raise ConfigError("evaluation: got no pairs, allowed: at least one")
    if len(hypotheses) != len(references):
        raise ConfigError(f"evaluation: got {len(hypotheses)} for {len(references)} references")
    bleu = bleu_of(target_lang)
    chrf = sacrebleu.CHRF()
    exact = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    return Quality(
        bleu=bleu.corpus_score(list(hypotheses), [list(references)]).score,
        signature=str(bleu.get_signature()),
        chrf=chrf.corpus_score(list(hypotheses), [list(references)]).score,
        exact=100.0 * exact / len(references),
        sentences=len(references),
        tokens_per_sec=math.nan,
        hypotheses=list(hypotheses),
    )
