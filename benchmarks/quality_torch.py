"""Training quality beside a plain PyTorch loop: same pairs, batches, updates and recipe.

    make bench NAME=quality_torch ARGS='--config configs/multi30k.py:DIR --train.steps 600'

First this project trains a run of the config, by `train`. Then torch.nn.Transformer, with PyTorch's
initial parameters, Adam, gradient clipping, dropout, masks and a schedule written anew, gets the
very same batches. Both are measured by their loss on the validation pairs, without smoothing.

torch drops attention weights and hidden units too, and its attention has biases, so the model of
this project does and has the same. torch smooths labels over all V tokens, this project over the
other V - 1; all else is meant to be equal. It needs torch.

A third run is this project's again, with dropout bits drawn by JAX's threefry instead of a hash.
"""

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import torch

from transformer_jax import command_line
from transformer_jax.config import Config, ConfigError, flag, load
from transformer_jax.data.pipeline import Position, eval_batches, train_batches, train_data
from transformer_jax.data.sources import load_splits
from transformer_jax.data.store import encode_pairs
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import dropout
from transformer_jax.train.loop import train
from transformer_jax.types import Batch


def comparable(config: Config) -> Config:
    """The config with what torch.nn.Transformer always has, one pair a row and a loss at the end.

    Raises:
        ConfigError: torch.nn.Transformer has no such model, or the loop below no such recipe.
    """
    model, optimizer = config.model, config.optimizer
    for field, got, *allowed in (
        ("model.positions", model.positions, "sinusoidal"),
        ("model.norm", model.norm, "layernorm"),
        ("model.activation", model.activation, "relu"),
        ("model.tied_embeddings", model.tied_embeddings, "all"),
        ("optimizer.name", optimizer.name, "adam"),
        ("optimizer.schedule", optimizer.schedule, "cosine", "noam"),
    ):
        if got not in allowed:
            raise ConfigError(f"{flag(field)}: got {got!r}, allowed here: {', '.join(allowed)}")
    drops = {
        name: model.dropout
        for name in ("embedding_dropout", "attention_dropout", "activation_dropout")
    }
    return replace(
        config,
        model=replace(model, attention_bias=True, norm_epsilon=1e-5, **drops),
        data=replace(config.data, pairs_per_row=1, batching="bucketed"),
        train=replace(
            config.train, eval_every_steps=0, eval_bleu_sentences=0, average_last=0, ema_decay=0.0
        ),
        # The report at the end translates, which is not what is asked here: as quickly as it can.
        decode=replace(config.decode, beam_size=1, max_extra_tokens=0),
    )


class Translator(torch.nn.Module):
    """torch.nn.Transformer between one table of embeddings and its transpose."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m = config.model
        first = m.norm_position == "pre"
        options = {"dropout": m.dropout, "norm_first": first, "batch_first": True}
        sizes = m.d_model, m.num_heads, m.d_ff
        final = lambda: torch.nn.LayerNorm(m.d_model) if first else None
        encoder = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(*sizes, **options),
            m.encoder_layers,
            final(),
            enable_nested_tensor=False,
        )
        decoder = torch.nn.TransformerDecoder(
            torch.nn.TransformerDecoderLayer(*sizes, **options), m.decoder_layers, final()
        )
        self.transformer = torch.nn.Transformer(
            *sizes[:2], custom_encoder=encoder, custom_decoder=decoder, batch_first=True
        )
        self.table = torch.nn.Parameter(torch.randn(m.vocab_size, m.d_model) * m.d_model**-0.5)
        self.dropout = torch.nn.Dropout(m.dropout)
        longest = max(config.data.max_source_tokens, config.data.max_target_tokens, 512)
        angle = torch.arange(longest)[:, None] / 10000 ** (
            torch.arange(0, m.d_model, 2) / m.d_model
        )
        self.register_buffer("waves", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Section 3.4 and 3.5 of the paper."""
        x = self.table[ids] * math.sqrt(self.table.shape[1]) + self.waves[: ids.shape[1]]
        return self.dropout(x)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and references of the real target tokens."""
        src, tgt_in, tgt_out = (
            torch.from_numpy(np.asarray(x, np.int64))
            for x in (batch.src_ids, batch.tgt_in_ids, batch.tgt_out_ids)
        )
        src_pad = torch.from_numpy(np.asarray(batch.src_segments) == 0)
        real = torch.from_numpy(np.asarray(batch.tgt_segments) > 0)
        some = real.any(1)  # rows of filler have nothing to attend to
        src, tgt_in, tgt_out, src_pad, real = (
            x[some] for x in (src, tgt_in, tgt_out, src_pad, real)
        )
        T = tgt_in.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embed(src),
            self.embed(tgt_in),
            tgt_mask=causal,
            src_key_padding_mask=src_pad,
            memory_key_padding_mask=src_pad,
            tgt_is_causal=True,
        )
        return hidden[real] @ self.table.T, tgt_out[real]


def rate(config: Config, update: int) -> float:
    """Learning rate of update 1, 2, ...: section 5.3 of the paper, or a cosine to 0."""
    o = config.optimizer
    if o.schedule == "noam":
        least = min(update**-0.5, update * max(o.warmup_steps, 1) ** -1.5)
        return o.learning_rate * config.model.d_model**-0.5 * least
    if update <= o.warmup_steps:
        return o.learning_rate * update / o.warmup_steps
    done = (update - o.warmup_steps) / (config.train.steps - o.warmup_steps)
    return o.learning_rate * (1 + math.cos(math.pi * done)) / 2


def torch_loss(config: Config, run_dir: Path) -> float:
    """Validation loss of the PyTorch loop, in nats per target token."""
    tokenizer, splits = Tokenizer.load(run_dir / "tokenizer"), load_splits(config.data)
    data = train_data(splits.train, tokenizer, config, 1)
    torch.manual_seed(config.seed)
    model, o = Translator(config).train(), config.optimizer
    adam = torch.optim.Adam(model.parameters(), 1.0, (o.b1, o.b2), o.epsilon)
    batches, losses = train_batches(data, Position(), config.train.steps), []
    for update, (batch, _) in enumerate(batches, 1):
        for group in adam.param_groups:
            group["lr"] = rate(config, update)
        adam.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(
            *model(batch), label_smoothing=config.train.label_smoothing
        )
        loss.backward()
        if o.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        adam.step()
        losses.append(loss.item())
        if update % 50 == 0:
            print(f"torch: update {update}, loss {np.mean(losses[-50:]):.3f}", flush=True)
    model.eval()
    langs = config.data.source_lang, config.data.target_lang
    pairs = [pair for part in splits.valid.values() for pair in part]
    encoded = encode_pairs(pairs, tokenizer, True, *langs)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in eval_batches(encoded, config.data.global_batch_tokens, 1):
            logits, references = model(batch)
            total += torch.nn.functional.cross_entropy(logits, references, reduction="sum").item()
            tokens += len(references)
    return total / tokens


def our_loss(config: Config, run_dir: Path) -> float:
    """Validation loss of a run of this project, in nats per target token."""
    train(config, run_dir)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line["loss"] for line in lines if line["part"] == "valid"][-1]


def threefry_loss(config: Config, run_dir: Path) -> float:
    """The same with dropout bits by JAX's own generator."""
    own = dropout.random_bits

    def bits(shape: tuple[int, ...], key: dropout.DropoutKey, *_: object) -> jax.Array:
        return jax.random.bits(jax.random.key(key.seed, impl="threefry2x32"), shape, "uint32")

    dropout.random_bits = bits
    try:
        return our_loss(config, run_dir)
    finally:
        dropout.random_bits = own


def main() -> None:
    """Train all and print their losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    options, rest = parser.parse_known_args()
    config = command_line.load_config_file(options.config)
    config = comparable(command_line.override(config, rest, "quality_torch.py", ""))
    # The tests are not to be looked at for this.
    config = replace(config, data=replace(config.data, test_source=(), test_target=()))
    with tempfile.TemporaryDirectory() as name:
        first = Path(name) / "ours"
        runs = {
            "this project": lambda: our_loss(config, first),
            "torch": lambda: torch_loss(load(first / "config.json"), first),
            "this project, threefry": lambda: threefry_loss(config, Path(name) / "threefry"),
        }
        print(f"{config.train.steps} updates, seed {config.seed}; nats a token after them")
        for run, loss in runs.items():
            start = time.perf_counter()
            found = loss()
            print(f"{run}: {found:.4f} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
