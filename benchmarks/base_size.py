"""Run directories of the base size, for benchmarks: of random weights, or of trained ones."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from transformer_jax.config import Config, ConfigError, DataConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.embedded import embedded_splits
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.trained import load_trained
from transformer_jax.interop.weights import write_run
from transformer_jax.model import Model
from transformer_jax.model.positions import sinusoids


def random_run(directory: Path, vocabulary: int) -> None:
    """A run directory of base size whose weights nobody trained."""
    config = Config(
        model=ModelConfig(vocab_size=vocabulary),
        tokenizer=TokenizerConfig(vocab_size=vocabulary, kind="bpe"),
        data=DataConfig(source_lang="en", target_lang="de"),
    )
    pairs = embedded_splits("de", cldr_train_pairs=config.data.cldr_train_pairs)[0]
    tokenizer = Tokenizer.train(pairs, config.tokenizer)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    )
    params = jax.jit(Model(config.model).init)(jax.random.key(0))
    write_run(directory, params, config, tokenizer)


def widened_run(directory: Path, checkpoint: str) -> None:
    """A run directory of base size that computes what a smaller, pre-norm one computes."""
    trained = load_trained(checkpoint)
    old, base = trained.config.model, ModelConfig()
    times = {
        "embed": base.d_model // old.d_model,
        "mlp": base.d_ff // old.d_ff,
        "heads": base.num_heads // old.num_heads,
    }
    times["kv_heads"] = times["heads"]
    fits = old.norm_position == "pre" and old.positions == "sinusoidal"
    fits &= old.tied_embeddings == "all"
    fits &= base.d_model == old.d_model * times["embed"] and base.d_ff == old.d_ff * times["mlp"]
    if not fits or base.num_heads != old.num_heads * times["heads"]:
        raise ConfigError(
            "--at-base-size: allowed: a pre-norm model with sinusoids and one table "
            "of embeddings, whose sizes divide those of base"
        )
    new = dataclasses.replace(
        old,
        d_model=base.d_model,
        d_ff=base.d_ff,
        num_heads=base.num_heads,
        encoder_layers=base.encoder_layers,
        decoder_layers=base.decoder_layers,
        positions="learned",
        max_positions=512,
    )
    copies = lambda x, axes: np.tile(np.asarray(x), [times.get(axis, 1) for axis in axes])
    params = jax.tree.map(copies, trained.params, Model(old).logical_axes())
    # Copies that a product sums over are divided by their number.
    summed = {name: times["embed"] for name in ("query", "key", "value", "inner", "gate")}
    summed |= {"out": times["heads"], "outer": times["mlp"]}
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x / summed.get(path[-1].key, 1), params
    )
    # One table for both ends: the input is scaled by sqrt(d_model), the output sums the copies.
    root = times["embed"] ** 0.5 if old.embedding_scale else 1.0
    params["embedding"] = params["embedding"] / root
    params["decoder_norm"] = {
        name: x * root / times["embed"] for name, x in params["decoder_norm"].items()
    }
    table = sinusoids(np.arange(512), old.d_model, old.sinusoid_order, old.sinusoid_exponent)
    for stack in ("encoder", "decoder"):
        depth, wanted = (getattr(c, f"{stack}_layers") for c in (old, new))
        params[f"{stack}_positions"] = copies(table.astype(np.float32), ("positions", "embed"))
        idle = jax.tree_util.tree_map_with_path(
            lambda path, x: x * (path[-1].key not in ("out", "outer", "outer_bias")),
            params[f"{stack}_0"],
        )
        for i in range(depth, wanted):
            params[f"{stack}_{i}"] = idle
    config = dataclasses.replace(trained.config, model=new)
    write_run(directory, params, config, trained.tokenizer)
