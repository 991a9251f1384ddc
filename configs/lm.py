r"""A decoder-only (GPT-style) language model on plain text, one text a line.

    python train.py --config configs/lm.py --workdir runs/lm \
        --data.source text --data.train-target train.txt --data.valid-target valid.txt

Without files of your own it learns the German side of the quickstart's text. Then

    echo 'Der Ordner' | python -m transformer_jax generate --checkpoint runs/lm
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
    """Six layers without an encoder, today's norms and positions."""
    return Config(
        model=ModelConfig(
            d_model=256,
            d_ff=1024,
            num_heads=4,
            encoder_layers=0,
            decoder_layers=6,
            norm_position="pre",
            norm="rmsnorm",
            positions="rotary",
            embedding_scale=False,
        ),
        tokenizer=TokenizerConfig(vocab_size=4000),
        data=DataConfig(
            source="embedded",
            max_target_tokens=256,
            global_batch_tokens=4096,
            num_buckets=4,
        ),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=1e-3, warmup_steps=200, clip_norm=1.0
        ),
        train=TrainConfig(
            steps=2000, label_smoothing=0.0, eval_every_steps=500, checkpoint_every_steps=500
        ),
    )
