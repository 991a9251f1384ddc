"""Your own parallel text: two files a side, line i of one translating line i of the other.

    python train.py --config configs/text.py --workdir runs/mine \\
        --data.train-source train.fr --data.train-target train.en \\
        --data.valid-source valid.fr --data.valid-target valid.en \\
        --data.source-lang fr --data.target-lang en

A middle-sized model for some hundred thousand pairs on one accelerator. For a few thousand pairs
make it smaller (--model.d-model 256 --model.d-ff 1024 --tokenizer.vocab-size 4000) and raise
dropout (--model.dropout 0.3); for millions take configs/base.py with --data.source text.
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
    """The paper's model at half its width; batches that fit a laptop."""
    return Config(
        model=ModelConfig(d_model=256, d_ff=1024, num_heads=4, norm_position="pre"),
        tokenizer=TokenizerConfig(vocab_size=8000),
        data=DataConfig(
            source="text",
            max_source_tokens=128,
            max_target_tokens=128,
            global_batch_tokens=4096,
        ),
        optimizer=OptimizerConfig(
            schedule="cosine", learning_rate=1e-3, warmup_steps=1000, clip_norm=1.0
        ),
        train=TrainConfig(steps=20_000, eval_every_steps=1000, checkpoint_every_steps=500),
    )
