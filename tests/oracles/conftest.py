"""A small model that has learned something, for exports to be compared on."""

from pathlib import Path

import pytest

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's kind of model, tiny, after half a minute on real text: its outputs end."""
    from transformer_jax.train.loop import train

    run = tmp_path_factory.mktemp("trained") / "run"
    config = Config(
        model=ModelConfig(d_model=64, d_ff=128, num_heads=4, encoder_layers=2, decoder_layers=2),
        tokenizer=TokenizerConfig(vocab_size=900),
        data=DataConfig(
            source="embedded",
            cldr_train_pairs=6000,
            max_source_tokens=40,
            max_target_tokens=40,
            global_batch_tokens=1600,
            num_buckets=2,
        ),
        optimizer=OptimizerConfig(learning_rate=1.0, warmup_steps=150),
        train=TrainConfig(
            steps=300,
            eval_every_steps=0,
            eval_bleu_sentences=0,
            checkpoint_every_steps=0,
            label_smoothing=0.0,
        ),
        decode=DecodeConfig(length_penalty=1.0, length_penalty_form="power", rule="transformers"),
    )
    assert train(config, run) == 0
    return run
