"""The stream of batches: pairs are encoded once, then batch i is made when it is needed."""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.config import Config, ConfigError
from transformer_jax.data.batching import Bucket, Encoded, Plan, choose_buckets, collate, keep
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Batch, Pair

logger = logging.getLogger(__name__)
_CHUNK = 10_000


class TrainData(NamedTuple):
    """Everything the training stream is made of, and what was left out."""

    encoded: Encoded
    plan: Plan
    report: str


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    with_source: bool = True,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> Encoded:
    """Ids of all pairs, EOS last; without sources, as decoder-only models want it, of targets.

    The languages are those of the tags, where the tokenizer has any.
    """
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    lengths: tuple[list[int], list[int]] = ([], [])
    for start in range(0, len(pairs), _CHUNK):
        chunk = pairs[start : start + _CHUNK]
        encoded = (
            tokenizer.encode_source([pair.source for pair in chunk], source_lang, target_lang)
            if with_source
            else [[]] * len(chunk),
            tokenizer.encode_target([pair.target for pair in chunk], target_lang),
        )
        for side, counts, sentences in zip(sides, lengths, encoded, strict=True):
            side.append(np.concatenate([np.asarray(ids, np.int32) for ids in sentences]))
            counts += map(len, sentences)
    flat = [np.concatenate(side) if side else np.zeros(0, np.int32) for side in sides]
    ends = [np.concatenate([[0], np.cumsum(counts)]).astype(np.int64) for counts in lengths]
    return Encoded(flat[0], ends[0], flat[1], ends[1], tokenizer.start_id)


def train_data(
    pairs: Sequence[Pair], tokenizer: Tokenizer, config: Config, row_multiple: int
) -> TrainData:
    """Encode, filter and plan the training pairs.

    Args:
        pairs: the training split.
        tokenizer: its vocabulary gives the ids.
        config: limits, batch size and seed.
        row_multiple: devices that share a batch.

    Raises:
        ConfigError: nothing is left to train on.
    """
    data = config.data
    with_source = config.model.encoder_layers > 0
    encoded = encode_pairs(pairs, tokenizer, with_source, data.source_lang, data.target_lang)
    kept, dropped = keep(encoded.lengths, data.max_source_tokens, data.max_target_tokens)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    report = f"kept {kept.sum()} of {len(pairs)} training pairs ({reasons})"
    if not kept.any():
        raise ConfigError(f"--data.max-source-tokens, --data.max-target-tokens: {report}")
    if kept.sum() < len(pairs) / 2:
        logger.warning("less than half of the training pairs is left: %s", report)
    encoded = _select(encoded, kept)
    lengths = encoded.lengths
    buckets = choose_buckets(lengths, data.num_buckets, data.global_batch_tokens, row_multiple)
    plan = Plan(lengths, buckets, config.seed)
    fill = _fill(lengths, plan)
    shapes = " ".join(f"{b.rows}x({b.src_length}+{b.tgt_length})" for b in buckets)
    report += f"; {plan.batches_per_epoch} batches an epoch, fill {fill:.1%}, shapes {shapes}"
    return TrainData(encoded, plan, report)


def train_batches(data: TrainData, first: int, stop: int) -> Iterator[Batch]:
    """Batches `first` to `stop` of the run, made ahead in a thread of Grain's."""
    import grain  # pulls in jax when that is installed, so not at the top

    dataset = grain.MapDataset.range(first, stop).map(
        lambda index: collate(data.encoded, *data.plan[int(index)])
    )
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.to_iter_dataset(options))


def eval_batches(encoded: Encoded, batch_tokens: int, row_multiple: int) -> Iterator[Batch]:
    """Every pair once, nothing filtered, few shapes, the last rows filled up."""
    lengths = encoded.lengths
    if not len(lengths):
        return
    buckets = choose_buckets(lengths, 2, batch_tokens, row_multiple)
    plan = Plan(lengths, buckets, seed=0)
    for index in range(plan.batches_per_epoch):
        yield collate(encoded, *plan[index])


def _select(encoded: Encoded, kept: np.ndarray) -> Encoded:
    if kept.all():
        return encoded
    result = []
    for flat, ends in ((encoded.src_ids, encoded.src_ends), (encoded.tgt_ids, encoded.tgt_ends)):
        lengths = np.diff(ends)
        result += [flat[np.repeat(kept, lengths)], np.concatenate([[0], np.cumsum(lengths[kept])])]
    return Encoded(result[0], result[1], result[2], result[3], encoded.start)


def _fill(lengths: np.ndarray, plan: Plan) -> float:
    """Real source and target tokens over all slots of an epoch."""
    shapes: list[Bucket] = [plan[i][0] for i in range(plan.batches_per_epoch)]
    slots = sum(b.rows * (b.src_length + b.tgt_length) for b in shapes)
    return float(lengths.sum()) / slots
