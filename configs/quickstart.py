"""Minutes on a laptop: real text from installed packages, a small model.

python train.py --config configs/quickstart.py --workdir runs/quickstart
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)


def get_config() -> Config:
    """English to German; --data.target-lang chooses another language."""
    return Config(
        model=ModelConfig(
            d_model=192,
            d_ff=768,
            num_heads=4,
            encoder_layers=3,
            decoder_layers=3,
            norm_position="pre",
        ),
        tokenizer=TokenizerConfig(vocab_size=4000, split_digits=True),
        data=DataConfig(
            source="embedded",
            max_source_tokens=96,
            max_target_tokens=96,
            global_batch_tokens=3000,
            num_buckets=8,
            pairs_per_row=1,
        ),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=3e-3, warmup_steps=150, clip_norm=1.0
        ),
        train=TrainConfig(
            steps=1100,
            eval_every_steps=550,
            eval_bleu_sentences=200,
            checkpoint_every_steps=100,
            keep_checkpoints=2,
        ),
    )
