"""A run of two layers and 300 pieces, and its Marian directory."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from transformer_jax.config import Config, DataConfig, DecodeConfig, TokenizerConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.trained import load_trained
from transformer_jax.interop.marian import export_marian
from transformer_jax.interop.weights import write_run
from transformer_jax.model import Model

WORDS = "the cat saw a dog and one bird sang Write to stop, fill 123 über größe".split()


@pytest.fixture(scope="session")
def lines() -> list[str]:
    return [" ".join(WORDS[i * j % len(WORDS)] for j in range(1, 8)) for i in range(200)]


@pytest.fixture(scope="session")
def tiny_tokenizer(lines: list[str]) -> Tokenizer:
    return Tokenizer.train(
        [(line, line.upper()) for line in lines], TokenizerConfig(vocab_size=310)
    )


@pytest.fixture(scope="session")
def run(tmp_path_factory, tiny_config, tiny_tokenizer) -> Path:
    """A run directory with the paper's kind of model, random."""
    directory = tmp_path_factory.mktemp("run") / "run"
    model = dataclasses.replace(tiny_config, vocab_size=tiny_tokenizer.vocab_size)
    params = jax.jit(Model(model).init)(jax.random.key(1))
    data = DataConfig(max_source_tokens=48, max_target_tokens=48)
    decode = DecodeConfig(max_extra_tokens=4)
    write_run(directory, params, Config(model=model, data=data, decode=decode), tiny_tokenizer)
    return directory


@pytest.fixture(scope="session")
def marian_directory(tmp_path_factory, run: Path) -> Path:
    """The run, exported."""
    directory = tmp_path_factory.mktemp("marian") / "marian"
    export_marian(load_trained(run), directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "marian"
    return directory
