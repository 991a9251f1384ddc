"""What a BLEU alone does not say: how sure it is, where it comes from, and whether a difference is
one. All by sacrebleu."""

import re
from collections.abc import Sequence
from typing import Any

import sacrebleu
from sacrebleu.significance import PairedTest

from transformer_jax.config import ConfigError
from transformer_jax.evaluate import bleu_of

# Words of the source at which a bucket of lengths begins.
_LENGTHS = (0, 10, 20, 30, 40, 60)
_SAMPLES = 1000  # of the bootstrap


def confidence(
    hypotheses: Sequence[str], references: Sequence[str], target_lang: str
) -> dict[str, Any]:
    """The interval that holds BLEU with 95 % over bootstrap samples of the sentences (Koehn 2004).

    Returns:
        mean and ci: BLEU lies in mean - ci to mean + ci.
    """
    score: Any = bleu_of(target_lang).corpus_score(
        list(hypotheses), [list(references)], n_bootstrap=_SAMPLES
    )
    return {"mean": score._mean, "ci": score._ci, "samples": _SAMPLES}


def by_length(
    sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str], target_lang: str
) -> dict[str, dict[str, float]]:
    """BLEU of the sentences whose source has so many words: {"0-9": {"bleu", "sentences"}, ...}."""
    bleu = bleu_of(target_lang)
    found = {}
    for low, high in zip(_LENGTHS, (*_LENGTHS[1:], None), strict=True):
        chosen = [
            i
            for i, source in enumerate(sources)
            if low <= len(source.split()) and (high is None or len(source.split()) < high)
        ]
        if chosen:
            some = [[texts[i] for i in chosen] for texts in (hypotheses, references)]
            name = f"{low}-{high - 1}" if high else f"{low}-"
            score = bleu.corpus_score(some[0], [some[1]]).score
            found[name] = {"bleu": score, "sentences": len(chosen)}
    return found


def compound_split_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Tokenised, cased BLEU with words split at hyphens, as the paper's figures were taken.

    The tokenizer is sacreBLEU's 13a, where the authors had that of Moses; report it as such, and
    beside the plain score: on the same translations it is higher.
    """
    tokenize: Any = sacrebleu.BLEU(tokenize="13a").tokenizer

    def split(text: str) -> str:
        return re.sub(r"(?<=\S)-(?=\S)", " ##AT##-##AT## ", tokenize(text))

    bleu = sacrebleu.BLEU(tokenize="none", force=True)
    return bleu.corpus_score([split(h) for h in hypotheses], [[split(r) for r in references]]).score


def paired(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    target_lang: str,
) -> dict[str, float]:
    """Whether these translations differ from a baseline's, by paired bootstrap (Koehn 2004).

    Returns:
        BLEU of both, and p: how often chance alone would make such a difference.

    Raises:
        ConfigError: the baseline has another number of lines.
    """
    if len(baseline) != len(hypotheses):
        raise ConfigError(f"--baseline: got {len(baseline)} lines, allowed: {len(hypotheses)}")
    test = PairedTest(
        [("baseline", list(baseline)), ("system", list(hypotheses))],
        {"BLEU": bleu_of(target_lang)},
        [list(references)],
        test_type="bs",
        n_samples=_SAMPLES,
    )
    results: Any = test()[1]
    first, second = results["BLEU"]
    # sacrebleu counts the samples that differ more, and between two equal systems none does.
    p = 1.0 if list(baseline) == list(hypotheses) else second.p_value
    return {"baseline_bleu": first.score, "bleu": second.score, "p": p}
