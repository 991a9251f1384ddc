"""Strings in, translations out: what people call."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, ConfigError
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.engine import Engine, Hypothesis
from transformer_jax.decode.trained import load_trained
from transformer_jax.model import Model
from transformer_jax.types import Score, Translation

logger = logging.getLogger(__name__)


class Translator:
    """A trained model, ready to translate.

    Attributes:
        params: the parameter tree.
        config: the Config of the run.
        tokenizer: the run's tokenizer.
        model: the pure functions that take `params`.
    """

    def __init__(self, params: Any, config: Config, tokenizer: Tokenizer) -> None:
        if not config.model.encoder_layers:
            raise ConfigError("--model.encoder-layers: got 0, a language model: use LanguageModel")
        self.params, self.config, self.tokenizer = params, config, tokenizer
        self.model = Model(config.model)
        self._engine = Engine(self.model, params, tokenizer.vocab_size)

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str | int | None = None) -> "Translator":
        """Load a run directory, or one step of it (a directory checkpoints/STEP).

        Args:
            path: the directory.
            which: "best", "latest" or a step; None: best, else latest.

        Raises:
            ConfigError: no such run, or its parts do not belong together.
        """
        return cls(*load_trained(path, which))

    def translate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The best translation of each text, in order; "" for a text without content.

        Keywords are those of translate_nbest, less num_hypotheses.
        """
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
        max_extra_tokens: int | None = None,
        max_source_tokens: int | None = None,
        batch_tokens: int | None = None,
        first_line: int = 1,
    ) -> list[list[Translation]]:
        """Several translations of each text, best first; none for a text without content.

        Args:
            texts: one sentence each.
            num_hypotheses: how many; at most beam_size.
            beam_size: hypotheses kept in the search; 1: greedy.
            length_penalty: alpha of ((5 + length) / 6) ** alpha.
            length_penalty_form: "paper": the above; "power": length ** alpha.
            max_extra_tokens: a translation may be this much longer than its source.
            max_source_tokens: longer sources are cut, with a warning; None: the longest that
                the model was trained on.
            batch_tokens: source slots of one batch.
            first_line: number of the first text in warnings.

        Absent keywords are those of the run's config.
        """
        _require_list("texts", texts)
        c = self.config.decode
        beam_size = c.beam_size if beam_size is None else beam_size
        extra = c.max_extra_tokens if max_extra_tokens is None else max_extra_tokens
        longest = max_source_tokens
        if longest is None:
            longest = self.config.data.max_source_tokens
        _require_least("beam_size", beam_size, 1)
        _require_least("max_extra_tokens", extra, 0)
        _require_least("max_source_tokens", longest, 2)  # one piece and EOS
        if not 1 <= num_hypotheses <= beam_size:
            raise ConfigError(f"num_hypotheses: got {num_hypotheses}, allowed: 1 to {beam_size}")
        sources, cut = self._encode_sources(texts, longest, first_line)
        # Some normalizations make pieces of white space.
        full = [i for i, ids in enumerate(sources) if len(ids) > 1 and texts[i].strip()]
        found = self._engine.search(
            [sources[i] for i in full],
            beam_size=beam_size,
            length_penalty=c.length_penalty if length_penalty is None else length_penalty,
            length_penalty_form=length_penalty_form or c.length_penalty_form,
            max_extra_tokens=extra,
            num_hypotheses=num_hypotheses,
            batch_tokens=c.batch_tokens if batch_tokens is None else batch_tokens,
        )
        results: list[list[Translation]] = [[] for _ in texts]
        for i, hypotheses in zip(full, found, strict=True):
            results[i] = [self._translation(h, cut[i]) for h in hypotheses]
        return results

    def score(self, sources: Sequence[str], targets: Sequence[str]) -> list[Score]:
        """Log-probability of each given target for its source, on the scale of Translation."""
        _require_list("sources", sources)
        _require_list("targets", targets)
        if len(sources) != len(targets):
            raise ConfigError(f"targets: got {len(targets)}, allowed: {len(sources)}, one a source")
        source_ids, _ = self._encode_sources(sources, self.config.data.max_source_tokens)
        target_ids = self.tokenizer.encode_target(targets)
        found = self._engine.score(source_ids, target_ids, self.config.decode.batch_tokens)
        return [Score(float(x.sum()), [float(p) for p in x], len(x)) for x in found]

    def _encode_sources(
        self, texts: Sequence[str], longest: int, first_line: int = 1
    ) -> tuple[list[list[int]], list[bool]]:
        """Ids of each text, and whether they were cut; each cut is told with its line."""
        sources = self.tokenizer.encode_source(texts)
        cut = [len(ids) > longest for ids in sources]
        for i, ids in enumerate(sources):
            if cut[i]:
                line = first_line + i
                logger.warning("line %d: cut from %d to %d tokens", line, len(ids), longest)
                sources[i] = [*ids[: longest - 1], self.tokenizer.eos_id]
        return sources, cut

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


def _require_list(name: str, texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TypeError(f"{name}: got one string, allowed: a list of strings")


def _require_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name}: got {value}, allowed: {least} or more")
