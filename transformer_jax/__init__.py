"""The Transformer of "Attention Is All You Need" in JAX and Flax: train it, restore it, translate.

    types.py        the legend of letters; Batch, Metrics, Translation
    config.py       one frozen tree of fields, checked, saved as strict JSON
    runtime.py      what JAX runs on, and the cache of compiled programs
    sharding.py     the device mesh, and the rules from axis names to mesh axes
    processes.py    several processes: who writes, and how all agree
    checkpoint.py   Orbax items by name, whole or not there
    data/           text -> Batch            tokenizer, sources, batching, pipeline
    model/          Batch -> logits          masks, positions, attention, layers, transformer
    train/          logits -> next state     loss, optimizer, state, step; loop and report above
    decode/         logits -> ids -> text    search, engine, translator, language_model
    evaluate.py     token loss, sacreBLEU, chrF
    topology.py     machines that are not there, and their compiler
    plan.py         what a run will need, without an accelerator
    __main__.py     python -m transformer_jax translate | score | evaluate | generate | plan

Names are resolved when they are first used, so that importing a part loads only that part.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_jax.config import Config, ConfigError
    from transformer_jax.decode.language_model import LanguageModel
    from transformer_jax.decode.sampling import sample
    from transformer_jax.decode.search import beam_search, greedy_search
    from transformer_jax.decode.translator import Translator
    from transformer_jax.model.transformer import Model
    from transformer_jax.types import SamplingOptions, Score, Translation

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "LanguageModel",
    "Model",
    "SamplingOptions",
    "Score",
    "Translation",
    "Translator",
    "beam_search",
    "greedy_search",
    "sample",
]
_HOMES = {
    "Config": "config",
    "ConfigError": "config",
    "LanguageModel": "decode.language_model",
    "Model": "model.transformer",
    "SamplingOptions": "types",
    "Score": "types",
    "Translation": "types",
    "Translator": "decode.translator",
    "beam_search": "decode.search",
    "greedy_search": "decode.search",
    "sample": "decode.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
