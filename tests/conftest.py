"""Eight simulated CPU devices for every test, and tiny models and runs to share."""

import gc
from collections.abc import Iterator

import jax
import pytest

from transformer_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.model import Model

jax.config.update("jax_num_cpu_devices", 8)

TINY = ModelConfig(
    vocab_size=40, d_model=32, d_ff=64, num_heads=4, encoder_layers=2, decoder_layers=2
)


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """A compiled program holds dozens of memory maps, of which Linux gives a process 65,530: beyond
    them jaxlib ends in a segmentation fault. One file of tests leaves up to 30,000."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """For programs that run for milliseconds: LLVM's optimisation takes longer than it saves."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture(scope="session")
def tiny_model() -> Model:
    return Model(TINY)


@pytest.fixture(scope="session")
def tiny_params(tiny_model):
    return tiny_model.init(jax.random.key(0))


@pytest.fixture()
def tiny_run(tmp_path) -> Config:
    """A config that trains on a small file of number words in seconds."""
    words = "zero one two three four five six seven eight nine".split()
    german = "null eins zwei drei vier fünf sechs sieben acht neun".split()
    numbers = [[(7 * i + 3 * j * j) % 10 for j in range(1 + i % 6)] for i in range(200)]
    for name, vocabulary in (("en", words), ("de", german)):
        lines = [" ".join(vocabulary[n] for n in row) for row in numbers]
        (tmp_path / f"train.{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (tmp_path / f"valid.{name}").write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    return Config(
        model=ModelConfig(d_model=32, d_ff=64, num_heads=4, encoder_layers=1, decoder_layers=1),
        tokenizer=TokenizerConfig(vocab_size=285),
        data=DataConfig(
            train_source=(str(tmp_path / "train.en"),),
            train_target=(str(tmp_path / "train.de"),),
            valid_source=(str(tmp_path / "valid.en"),),
            valid_target=(str(tmp_path / "valid.de"),),
            max_source_tokens=32,
            max_target_tokens=32,
            global_batch_tokens=512,
            num_buckets=2,
        ),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=20),
        train=TrainConfig(
            steps=12,
            eval_every_steps=6,
            eval_bleu_sentences=4,
            checkpoint_every_steps=4,
            log_every_steps=2,
        ),
    )
