"""The paper's big model on WMT 2014 English-German, by its recipe.

    python train.py --config configs/big.py --workdir runs/big

Hardware of the paper: 8 P100, 3.5 days (300,000 steps of 1.0 s). Expected there: 28.4 BLEU on
newstest2014 (tokenised, compounds split, the last 20 checkpoints averaged), which is about 28.0 to
28.6 by sacreBLEU. Not yet run here to the end.
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
    """As base, but wider and with dropout 0.3."""
    return Config(
        model=ModelConfig(
            d_model=1024, d_ff=4096, num_heads=16, dropout=0.3, embedding_dropout=0.3
        ),
        tokenizer=TokenizerConfig(vocab_size=37_000, kind="bpe"),
        data=DataConfig(
            source="tfds",
            tfds_name="wmt14_translate/de-en",
            source_lang="en",
            target_lang="de",
            max_source_tokens=256,
            max_target_tokens=256,
            global_batch_tokens=25_000,
        ),
        optimizer=OptimizerConfig(),
        train=TrainConfig(
            steps=300_000,
            eval_every_steps=10_000,
            checkpoint_every_steps=600,
            keep_checkpoints=20,
            average_last=20,
        ),
    )
