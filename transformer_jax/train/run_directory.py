"""The directory of a run: made anew, or found and checked against the config."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax import config as configs
from transformer_jax.checkpoint import find_step, load_params, steps_of
from transformer_jax.config import Config, ConfigError
from transformer_jax.data.sources import Corpus
from transformer_jax.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


# Of a model that starts from another run, what may differ from that run's: how it is trained and
# computed, not what it computes.
_OWN_FIELDS = (
    *("dropout", "embedding_dropout", "attention_dropout", "activation_dropout"),
    *("dtype", "attention_implementation", "layers", "remat"),
)


class Opened(NamedTuple):
    """What a run goes by: its config, with the size of the vocabulary, and its tokenizer."""

    config: Config
    tokenizer: Tokenizer


def open_run_directory(config: Config, run_dir: Path, pairs: Corpus, makes: bool = True) -> Opened:
    """Config and tokenizer of a run: those that are there, if they fit this config, or new ones.

    Args:
        config: as the user gave it.
        run_dir: the run directory; may not exist yet.
        pairs: the training split, to learn a new tokenizer from.
        makes: False where another process has already made what was missing.

    Raises:
        ConfigError: the run that is there was started with another config.
    """
    path = run_dir / "config.json"
    if path.exists():
        saved = configs.load(path)
        tokenizer = Tokenizer.load(run_dir / "tokenizer")
        if config.train.init_from and config.train.init_from == saved.train.init_from:
            config = _with_model_of(saved, config)
        config = _with_vocabulary(config, tokenizer)
        for name, (old, new) in configs.differences(saved, config).items():
            if not name.startswith(configs.RESUMABLE):
                raise ConfigError(
                    f"{configs.flag(name)}: got {new!r}, but {run_dir} was started with {old!r}; "
                    "allowed: the same value, or another --workdir"
                )
        return Opened(config, tokenizer)
    if steps_of(run_dir):
        raise ConfigError(f"--workdir: {run_dir} holds checkpoints but no config.json")
    if config.train.init_from:
        other = configs.load(_other_run(config) / "config.json")
        old = config
        config = configs.check(_with_model_of(other, config))
        for name, (asked, got) in configs.differences(old.model, config.model).items():
            logger.info("%s: %s, not %s, as in --train.init-from", name, got, asked)
    if not makes:
        tokenizer = Tokenizer.load(run_dir / "tokenizer")
        return Opened(_with_vocabulary(config, tokenizer), tokenizer)
    if config.train.init_from:
        tokenizer = Tokenizer.load(_other_run(config) / "tokenizer")
    else:
        if not config.tokenizer.model:
            logger.info("training the tokenizer")
        tokenizer = Tokenizer.new(pairs, config.tokenizer, config.data.train_target_langs)
    config = _with_vocabulary(config, tokenizer)
    tokenizer.save(run_dir / "tokenizer")
    return Opened(config, tokenizer)


def save_config(config: Config, run_dir: Path) -> None:
    """Write config.json: from now on the directory belongs to this config."""
    write_whole(run_dir / "config.json", configs.to_json(config))


def params_of_another_run(config: Config, tokenizer: Tokenizer, abstract: Any) -> Any:
    """Parameters of --train.init-from, onto the devices that `abstract` names."""
    other = _other_run(config)
    step = find_step(other, "best", configs.load(other / "config.json").train.best_metric)
    return load_params(other, step, abstract, tokenizer.fingerprint)


def _other_run(config: Config) -> Path:
    return Path(config.train.init_from).expanduser().absolute()


def _with_model_of(other: Config, config: Config) -> Config:
    """The config with the model that the weights of another run belong to."""
    own = {name: getattr(config.model, name) for name in _OWN_FIELDS}
    return dataclasses.replace(config, model=dataclasses.replace(other.model, **own))


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _with_vocabulary(config: Config, tokenizer: Tokenizer) -> Config:
    """The config whose model has a row for each piece."""
    size = config.model.vocab_size
    if size and size < tokenizer.vocab_size:
        raise ConfigError(
            f"--model.vocab-size: got {size}, allowed: 0 or at least {tokenizer.vocab_size}, "
            "the number of pieces of the tokenizer"
        )
    source_size = config.model.source_vocab_size
    if tokenizer.source is not tokenizer.target:
        source_size = source_size or tokenizer.source_vocab_size
    if 0 < source_size < tokenizer.source_vocab_size:
        raise ConfigError(
            f"--model.source-vocab-size: got {source_size}, allowed: 0 or at least "
            f"{tokenizer.source_vocab_size}, the number of source pieces of the tokenizer"
        )
    model = dataclasses.replace(
        config.model, vocab_size=size or tokenizer.vocab_size, source_vocab_size=source_size
    )
    return dataclasses.replace(config, model=model)
