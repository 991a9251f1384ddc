"""Strings in, translations out: what people call."""

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config, ConfigError, MeshConfig, base_language
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.engine import LENGTHS, Engine, Hypothesis, Request, padded, rung
from transformer_jax.decode.sampling import Sampling
from transformer_jax.decode.search import BeamSearch
from transformer_jax.decode.sentences import split_text
from transformer_jax.decode.trained import Trained, load_trained
from transformer_jax.model import Model
from transformer_jax.types import Batch, SamplingOptions, Score, Translation

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Languages whose sentences follow each other without a space.
_WITHOUT_SPACES = ("zh", "ja", "th", "lo", "km", "my")


class Translator:
    """A trained model, ready to translate; safe to call from several threads.

    Args:
        params: the parameter tree.
        config: the Config of the run.
        tokenizer: the run's tokenizer.
        mesh: devices that share the rows of a batch; None: wherever the parameters are.
        others: further models of the same tokenizer, which vote.

    Attributes:
        params: as given.
        config: as given.
        tokenizer: as given.
        model: the pure functions that take `params`.
    """

    def __init__(
        self,
        params: Any,
        config: Config,
        tokenizer: Tokenizer,
        mesh: Mesh | None = None,
        others: Sequence[Trained] = (),
    ) -> None:
        if not config.model.encoder_layers:
            raise ConfigError("--model.encoder-layers: got 0, a language model: use LanguageModel")
        for other in others:
            if other.tokenizer.fingerprint != tokenizer.fingerprint:
                raise ConfigError("checkpoints: got different tokenizers, allowed: one for all")
        self.params, self.config, self.tokenizer = params, config, tokenizer
        self.model = Model(config.model)
        models = [(self.model, params), *((Model(o.config.model), o.params) for o in others)]
        forced = 1 if tokenizer.tags and tokenizer.tag_place == "both" else 0
        self._engine = Engine(models, tokenizer.vocab_size, mesh, tokenizer.special, forced)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path | Sequence[str | Path],
        which: str | int | None = None,
        *,
        mesh: MeshConfig | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
    ) -> "Translator":
        """Load a run directory, or one step of it (a directory checkpoints/STEP).

        Args:
            path: the directory; several: an ensemble of runs with one tokenizer.
            which: "best", "latest", "average" or a step; None: best, else latest.
            mesh: how the model is spread over devices; None: rows over all of them.
            dtype: of activations; None: that of the run.

        Raises:
            ConfigError: no such run, or its parts do not belong together.
        """
        paths = [path] if isinstance(path, str | Path) else list(path)
        first, *others = (load_trained(p, which, mesh, dtype) for p in paths)
        return cls(first.params, first.config, first.tokenizer, first.mesh, others)

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text, in order; "" for a text without content.

        Keywords are those of translate_nbest; with `choose` "mbr" num_hypotheses counts too.
        """
        if options.get("choose") != "mbr":
            options["num_hypotheses"] = 1
        found = self.translate_nbest(texts, **options)
        return [hypotheses[0].text if hypotheses else "" for hypotheses in found]

    def translate_nbest(
        self,
        texts: Sequence[str],
        *,
        num_hypotheses: int = 1,
        beam_size: int | None = None,
        length_penalty: float | None = None,
        length_penalty_form: str | None = None,
        rule: str | None = None,
        min_length: int = 0,
        no_repeat_ngram: int = 0,
        max_extra_tokens: int | None = None,
        max_source_tokens: int | None = None,
        split: bool = False,
        prefix: Sequence[str] | None = None,
        source_lang: str | None = None,
        target_lang: str | None = None,
        sampling: SamplingOptions | Mapping[str, Any] | None = None,
        choose: Literal["score", "mbr"] = "score",
        attention: bool = False,
        batch_tokens: int | None = None,
        first_line: int = 1,
    ) -> list[list[Translation]]:
        """Several translations of each text, best first; none for a text without content.

        Args:
            texts: one sentence each.
            num_hypotheses: how many; at most beam_size, except when they are drawn.
            beam_size: hypotheses kept in the search; 1: greedy.
            length_penalty: alpha of ((5 + length) / 6) ** alpha.
            length_penalty_form: "paper": the above; "power": length ** alpha.
            rule: which continuations count and when a search ends; see search.py.
            min_length: tokens that a translation has at least.
            no_repeat_ngram: no sequence of so many tokens comes twice; 0: it may.
            max_extra_tokens: a translation may be this much longer than its source.
            max_source_tokens: longer sources are cut, with a warning; None: the longest that
                the model was trained on.
            split: translate longer sources in parts, cut at the ends of sentences, instead.
            prefix: what each translation begins with, one for each text.
            source_lang: of the texts, where the tokenizer has language tags for it.
            target_lang: of the translations, where the tokenizer has language tags.
            sampling: draw instead of searching.
            choose: "mbr": of all hypotheses the one most like the others, by chrF, comes first.
            attention: add the cross-attention of the last layer, averaged over heads.
            batch_tokens: source slots of one batch.
            first_line: number of the first text in warnings.

        Absent keywords are those of the run's config.
        """
        _require_list("texts", texts)
        c = self.config.decode
        beam_size = _given(beam_size, c.beam_size)
        extra = _given(max_extra_tokens, c.max_extra_tokens)
        longest = _given(max_source_tokens, self.config.data.max_source_tokens)
        for name, value, least in (
            ("beam_size", beam_size, 1),
            ("num_hypotheses", num_hypotheses, 1),
            ("max_extra_tokens", extra, 0),
            ("max_source_tokens", longest, 2),  # one piece and EOS
            ("min_length", min_length, 0),
            ("no_repeat_ngram", no_repeat_ngram, 0),
        ):
            _require_least(name, value, least)
        if split and attention:
            raise ConfigError("attention: got True with split, allowed: one of them")
        eos_id, seed = self.tokenizer.eos_id, 0
        if sampling is not None:
            search, seed = _sampling(sampling, num_hypotheses, min_length, eos_id)
        elif num_hypotheses > beam_size:
            raise ConfigError(f"num_hypotheses: got {num_hypotheses}, allowed: 1 to {beam_size}")
        else:
            search = BeamSearch(
                beam_size,
                eos_id,
                length_penalty=_given(length_penalty, c.length_penalty),
                length_penalty_form=length_penalty_form or c.length_penalty_form,
                num_hypotheses=num_hypotheses,
                min_length=min_length,
                no_repeat_ngram=no_repeat_ngram,
                rule=rule or c.rule,
            )
        langs = self._languages(source_lang, target_lang)
        fits = lambda part: (
            len(part.encode()) < longest - 1  # a tag, EOS
            or len(self.tokenizer.encode_source([part], *langs)[0]) <= longest
        )
        parts = [split_text(text, fits) if split else [text] for text in texts]
        owner = [i for i, some in enumerate(parts) for _ in some]
        parts = [part for some in parts for part in some]
        lines = [first_line + i for i in owner]
        sources, cut = self._encode_sources(parts, longest, langs, lines)
        prefixes = self._encode_prefixes(texts, prefix, langs[1])
        tag = self.tokenizer.target_prefix(langs[1])
        # Some normalizations make pieces of white space.
        full = [k for k, ids in enumerate(sources) if len(ids) > 1 and parts[k].strip()]
        requests = []
        for k in full:
            i = owner[k]
            begin, prefixes[i] = prefixes[i], tag  # of a text in parts the first has the prefix
            limit = max(len(sources[k]) + extra, len(begin) + 1)
            requests.append(Request(sources[k], limit, begin, seed + first_line - 1 + i))
        found = self._engine.decode(search, requests, _given(batch_tokens, c.batch_tokens))
        of_text: list[list[list[Translation]]] = [[] for _ in texts]
        for k, hypotheses in zip(full, found, strict=True):
            some = [self._translation(h, cut[k]) for h in hypotheses]
            if choose == "mbr":
                some = _most_alike_first(some)
            if attention:
                some = [
                    t._replace(attention=self._attention(sources[k], h.ids))
                    for t, h in zip(some, hypotheses, strict=True)
                ]
            of_text[owner[k]].append(some)
        space = "" if base_language(langs[1] or "") in _WITHOUT_SPACES else " "
        return [_joined(some, space) for some in of_text]

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        source_lang: str | None = None,
        target_lang: str | None = None,
    ) -> list[Score]:
        """Log-probability of each given target for its source, on the scale of Translation."""
        _require_list("sources", sources)
        _require_list("targets", targets)
        if len(sources) != len(targets):
            raise ConfigError(f"targets: got {len(targets)}, allowed: {len(sources)}, one a source")
        langs, lines = self._languages(source_lang, target_lang), range(1, len(sources) + 1)
        longest = self.config.data.max_source_tokens
        source_ids, _ = self._encode_sources(sources, longest, langs, lines)
        target_ids = self.tokenizer.encode_target(targets, langs[1])
        found = self._engine.score(source_ids, target_ids, self.config.decode.batch_tokens)
        return [Score(float(x.sum()), [float(p) for p in x], len(x)) for x in found]

    def _languages(
        self, source_lang: str | None, target_lang: str | None
    ) -> tuple[str | None, str | None]:
        """Languages of both sides: as asked for, or those of the run."""
        data, tokenizer = self.config.data, self.tokenizer
        for name, lang, known in (
            ("source_lang", source_lang, data.source_lang),
            ("target_lang", target_lang, data.target_lang),
        ):
            of_tags = tokenizer.tags and (name == "target_lang" or tokenizer.tag_place == "both")
            if lang not in (None, known) and not of_tags:
                raise ConfigError(f"{name}: got {lang!r}, allowed: {known} (no tag of another)")
        return source_lang or data.source_lang, target_lang or data.target_lang

    def _encode_sources(
        self,
        texts: Sequence[str],
        longest: int,
        langs: tuple[str | None, str | None],
        lines: Sequence[int],
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of each text, and whether they were cut; each cut is told with its line."""
        sources = self.tokenizer.encode_source(texts, *langs)
        cut = [len(ids) > longest for ids in sources]
        for i, ids in enumerate(sources):
            if cut[i]:
                logger.warning("line %d: cut from %d to %d tokens", lines[i], len(ids), longest)
                sources[i] = [*ids[: longest - 1], self.tokenizer.eos_id]
        return sources, cut

    def _encode_prefixes(
        self, texts: Sequence[str], prefix: Sequence[str] | None, target_lang: str | None
    ) -> list[list[int]]:
        """Ids that each target begins with."""
        if prefix is None:
            return [self.tokenizer.target_prefix(target_lang) for _ in texts]
        _require_list("prefix", prefix)
        if len(prefix) != len(texts):
            raise ConfigError(f"prefix: got {len(prefix)}, allowed: {len(texts)}, one a text")
        return [ids[:-1] for ids in self.tokenizer.encode_target(prefix, target_lang)]

    def _translation(self, hypothesis: Hypothesis, cut: bool) -> Translation:
        ids = hypothesis.ids
        return Translation(
            text=self.tokenizer.decode(ids),
            pieces=self.tokenizer.pieces(ids),
            log_prob=hypothesis.log_prob,
            score=hypothesis.score,
            finished=hypothesis.finished,
            truncated_source=cut,
        )

    def _attention(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """Cross-attention of the last layer, mean over heads: [target tokens, source tokens]."""
        src_ids = padded([source], 1, rung(len(source), LENGTHS))
        tgt_ids = padded([[self.tokenizer.start_id, *target[:-1]]], 1, rung(len(target), LENGTHS))
        real = lambda ids, length: (np.arange(ids.shape[1]) < length)[None].astype(np.int32)
        segments = [real(src_ids, len(source)), real(tgt_ids, len(target))]
        batch = Batch(src_ids, segments[0], tgt_ids, tgt_ids, segments[1])
        weights = _attention_weights(self.params, batch, model=self.model)
        last = f"decoder_{self.config.model.decoder_layers - 1}.cross_attention"
        return np.asarray(weights[last][0].mean(0))[: len(target), : len(source)]


@functools.partial(jax.jit, static_argnames="model")
def _attention_weights(params: Any, batch: Batch, *, model: Model) -> dict[str, jax.Array]:
    return model.attention_weights(params, batch)


def _sampling(
    given: SamplingOptions | Mapping[str, Any], draws: int, min_length: int, eos_id: int
) -> tuple[Sampling, int]:
    """The sampler and the seed."""
    if isinstance(given, Mapping):
        unknown = set(given) - set(SamplingOptions._fields)
        if unknown:
            allowed = ", ".join(SamplingOptions._fields)
            raise ConfigError(f"sampling: got {sorted(unknown)[0]!r}, allowed: {allowed}")
        given = SamplingOptions(**given)
    o = given
    for name, is_right, allowed in (
        ("temperature", o.temperature >= 0, "0 or more"),
        ("top_k", o.top_k >= 0, "0 or more"),
        ("top_p", 0 < o.top_p <= 1, "above 0, up to 1"),
        ("min_p", 0 <= o.min_p <= 1, "0 to 1"),
    ):
        if not is_right:
            raise ConfigError(f"sampling.{name}: got {getattr(o, name)}, allowed: {allowed}")
    drawn = Sampling(draws, eos_id, o.temperature, o.top_k, o.top_p, o.min_p, min_length)
    return drawn, o.seed


def _joined(parts: list[list[Translation]], space: str) -> list[Translation]:
    """The k-th best translations of the parts of a text, one after the other."""
    if len(parts) <= 1:
        return parts[0] if parts else []
    return [
        Translation(
            text=space.join(t.text for t in some),
            pieces=[piece for t in some for piece in t.pieces],
            log_prob=sum(t.log_prob for t in some),
            score=sum(t.score for t in some),
            finished=all(t.finished for t in some),
            truncated_source=any(t.truncated_source for t in some),
        )
        for some in zip(*parts, strict=False)
    ]


def _most_alike_first(hypotheses: list[Translation]) -> list[Translation]:
    """Minimum Bayes risk: by mean chrF against all hypotheses, each as a reference (Eikema and
    Aziz 2020)."""
    from sacrebleu import CHRF  # the one part of decoding that needs it

    metric = CHRF()
    texts = [h.text for h in hypotheses]
    gain = [sum(metric.sentence_score(text, [other]).score for other in texts) for text in texts]
    order = sorted(range(len(texts)), key=lambda i: -gain[i])
    return [hypotheses[i] for i in order]


def _given(value: _T | None, default: _T) -> _T:
    """A keyword, or what the config has in its place; 0 is a value."""
    return default if value is None else value


def _require_list(name: str, texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TypeError(f"{name}: got one string, allowed: a list of strings")


def _require_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: got {value}, allowed: {least} or more")
