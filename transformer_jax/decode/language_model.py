"""Prompts in, continuations out: decoder-only models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from transformer_jax.config import Config, ConfigError
from transformer_jax.data.tokenizer import EOS, Tokenizer
from transformer_jax.decode.engine import Engine, Request
from transformer_jax.decode.sampling import Sampling
from transformer_jax.decode.trained import load_trained
from transformer_jax.model import Model
from transformer_jax.types import Score


class LanguageModel:
    """A trained decoder-only model.

    Attributes:
        params: the parameter tree.
        config: the Config of the run.
        tokenizer: the run's tokenizer.
        model: the pure functions that take `params`.
    """

    def __init__(
        self, params: Any, config: Config, tokenizer: Tokenizer, mesh: Mesh | None = None
    ) -> None:
        if config.model.encoder_layers:
            raise ConfigError(
                f"--model.encoder-layers: got {config.model.encoder_layers}, "
                "allowed: 0 (a model with an encoder is a Translator)"
            )
        self.params, self.config, self.tokenizer = params, config, tokenizer
        self.model = Model(config.model)
        self._engine = Engine([(self.model, params)], tokenizer.vocab_size, mesh)

    @classmethod
    def from_checkpoint(cls, path: str | Path, which: str | int | None = None) -> "LanguageModel":
        """Load a run directory; arguments and errors as in Translator.from_checkpoint."""
        return cls(*load_trained(path, which))

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        """Continue each prompt until the model ends the text, or for max_tokens.

        Args:
            prompts: texts of any length; "" starts a new text.
            max_tokens: most new tokens.
            temperature: of the distribution that is drawn from; 0: the likeliest token.
            seed: prompt i draws with seed + i, whatever it is batched with.

        Returns:
            The continuations alone, in order.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts: got one string, allowed: a list of strings")
        if max_tokens < 1 or temperature < 0:
            raise ConfigError(
                f"max_tokens, temperature: got {max_tokens}, {temperature}, "
                "allowed: 1 or more, 0 or more"
            )
        encoded = self.tokenizer.encode_target(prompts)
        requests = [
            Request((), len(ids) - 1 + max_tokens, ids[:-1], seed + number)
            for number, ids in enumerate(encoded)
        ]
        search = Sampling(1, EOS, temperature=temperature)
        found = self._engine.decode(search, requests, self.config.decode.batch_tokens)
        return [
            self.tokenizer.decode(hypotheses[0].ids[len(ids) - 1 :])
            for hypotheses, ids in zip(found, encoded, strict=True)
        ]

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Log-probability of each text, its end included."""
        if isinstance(texts, str):
            raise TypeError("texts: got one string, allowed: a list of strings")
        targets = self.tokenizer.encode_target(texts)
        found = self._engine.score(None, targets, self.config.decode.batch_tokens)
        return [Score(float(x.sum()), [float(p) for p in x], len(x)) for x in found]
