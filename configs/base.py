"""The paper's base model on WMT 2014 English-German, by its recipe.

    python train.py --config configs/base.py --workdir runs/base

Hardware of the paper: 8 P100, 12 hours (100,000 steps of 0.4 s). Expected there: 27.3 BLEU on
newstest2014 (tokenised, compounds split, the last 5 checkpoints averaged), which is about 26.8 to
27.5 by sacreBLEU. Not yet run here to the end. TFDS prepares the data, with the network, once.
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
    """Sections 5.1 to 5.4; all defaults of ModelConfig and OptimizerConfig are the base model's."""
    return Config(
        model=ModelConfig(),
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
            steps=100_000,
            eval_every_steps=5000,
            checkpoint_every_steps=1500,
            keep_checkpoints=5,
            average_last=5,
        ),
    )
