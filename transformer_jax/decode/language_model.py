"""Prompts in, continuations out: decoder-only models."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, ConfigError
from transformer_jax.data.tokenizer import EOS, PAD, START, Tokenizer
from transformer_jax.decode.engine import Engine, source_length
from transformer_jax.decode.search import sample
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

    def __init__(self, params: Any, config: Config, tokenizer: Tokenizer) -> None:
        if config.model.encoder_layers:
            raise ConfigError(
                f"--model.encoder-layers: got {config.model.encoder_layers}, "
                "allowed: 0 (a model with an encoder is a Translator)"
            )
        self.params, self.config, self.tokenizer = params, config, tokenizer
        self.model = Model(config.model)
        self._engine = Engine(self.model, params, tokenizer.vocab_size)

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
        results = []
        for number, ids in enumerate(encoded):
            prompt = [START, *ids[:-1]]
            width = source_length(len(prompt))
            buffer = source_length(max_tokens)
            padded = np.full((1, width), PAD, np.int32)
            padded[0, : len(prompt)] = prompt
            found = _continue(
                self.params,
                padded,
                np.asarray([len(prompt)]),
                np.asarray([max_tokens]),
                np.asarray([seed + number]),
                np.float32(temperature),
                self._engine.allowed,
                model=self.model,
                max_len=buffer,
            )
            found = np.asarray(found)[0]
            ends = np.flatnonzero(found == EOS)
            results.append(self.tokenizer.decode(found[: ends[0] if len(ends) else None]))
        return results

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Log-probability of each text, its end included."""
        if isinstance(texts, str):
            raise TypeError("texts: got one string, allowed: a list of strings")
        targets = self.tokenizer.encode_target(texts)
        found = self._engine.score(None, targets, self.config.decode.batch_tokens)
        return [Score(float(x.sum()), [float(p) for p in x], len(x)) for x in found]


@functools.partial(jax.jit, static_argnames=("model", "max_len"))
def _continue(
    params: Any,
    prompt: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    allowed: jax.Array,
    *,
    model: Model,
    max_len: int,
) -> jax.Array:
    """Prefill all of the prompt [B, P] but its last token in one pass, then sample: ids [B, T]."""
    B, P = prompt.shape
    last = jnp.take_along_axis(prompt, length[:, None] - 1, 1)[:, 0]
    cache = model.init_cache(params, None, None, P + max_len, batch_size=B)
    before = jnp.arange(P) < length[:, None] - 1
    _, cache = model.prefill(params, prompt, cache, before)
    return sample(
        functools.partial(model.decode_step, params),
        cache,
        last,
        max_len=max_len,
        limit=limit,
        eos_id=EOS,
        seed=seed,
        temperature=temperature,
        allowed=allowed,
    ).ids[:, 0]
