"""Multi30k English to German, 29,000 image captions (fetch it yourself: github.com/multi30k).

    python train.py --config configs/multi30k.py:DIR --workdir runs/multi30k

DIR holds train.en, train.de, val.en, val.de, test_2016_flickr.en and test_2016_flickr.de.
For the other direction add --data.source-lang de --data.target-lang en and swap the files.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config(directory: str = "data/multi30k") -> Config:
    """A small model with strong dropout, for a small corpus."""
    return Config(
        model=ModelConfig(
            d_model=256,
            d_ff=1024,
            num_heads=4,
            encoder_layers=3,
            decoder_layers=3,
            norm_position="pre",
            dropout=0.3,
            embedding_dropout=0.3,
        ),
        tokenizer=TokenizerConfig(vocab_size=8000),
        data=DataConfig(
            source="text",
            train_source=(f"{directory}/train.en",),
            train_target=(f"{directory}/train.de",),
            valid_source=(f"{directory}/val.en",),
            valid_target=(f"{directory}/val.de",),
            test_source=(f"{directory}/test_2016_flickr.en",),
            test_target=(f"{directory}/test_2016_flickr.de",),
            max_source_tokens=96,
            max_target_tokens=96,
            global_batch_tokens=4096,
        ),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=1e-3, warmup_steps=500, clip_norm=1.0
        ),
        train=TrainConfig(steps=2500, eval_every_steps=500, checkpoint_every_steps=250),
    )
