"""Multi30k English to German, 29,000 image captions (fetch it yourself: github.com/multi30k).

    python train.py --config configs/multi30k.py:DIR --workdir runs/multi30k-en-de
    python train.py --config configs/multi30k.py:DIR:de-en --workdir runs/multi30k-de-en

DIR holds train.en, train.de, val.en, val.de, test_2016_flickr.en and test_2016_flickr.de.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config(place: str = "data/multi30k") -> Config:
    """A small model and ten epochs, for a small corpus.

    Args:
        place: the directory, and after a colon another direction than en-de.
    """
    directory, _, direction = place.partition(":")
    source, _, target = (direction or "en-de").partition("-")
    return Config(
        model=ModelConfig(
            d_model=256,
            d_ff=512,
            num_heads=4,
            encoder_layers=3,
            decoder_layers=3,
            norm_position="pre",
            dropout=0.2,
            embedding_dropout=0.2,
        ),
        tokenizer=TokenizerConfig(vocab_size=6000),
        data=DataConfig(
            source="text",
            source_lang=source,
            target_lang=target,
            train_source=(f"{directory}/train.{source}",),
            train_target=(f"{directory}/train.{target}",),
            valid_source=(f"{directory}/val.{source}",),
            valid_target=(f"{directory}/val.{target}",),
            test_source=(f"{directory}/test_2016_flickr.{source}",),
            test_target=(f"{directory}/test_2016_flickr.{target}",),
            max_source_tokens=96,
            max_target_tokens=96,
            global_batch_tokens=2048,
        ),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=1.5e-3, warmup_steps=400, clip_norm=1.0
        ),
        train=TrainConfig(
            steps=2800,
            eval_every_steps=700,
            checkpoint_every_steps=100,
            keep_checkpoints=10,
            average_last=5,
        ),
    )
