"""The stream of training batches, and where a run stands in it.

The batches of an epoch are a function of (seed, epoch, data, config) alone. Devices and processes
only share their rows, so a run may go on with any number of them; its position is two counts.
"""

import itertools
import logging
import math
import queue
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.config import Config, ConfigError, DataConfig
from transformer_jax.data.alignment import shifted_stretches
from transformer_jax.data.batching import Bucket, Encoded, choose_buckets, collate, in_buckets
from transformer_jax.data.filters import REASONS, Marks, keep, repeats_of
from transformer_jax.data.order import EpochOrder, repeats
from transformer_jax.data.packing import pack, packed_shape, shared_shapes
from transformer_jax.data.sampling import Resampled, Sentences, as_encoded
from transformer_jax.data.sources import Corpus
from transformer_jax.data.store import Store, open_store
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Batch

logger = logging.getLogger(__name__)
_WINDOW = 8192  # pairs that are put into rows together
_SEGMENT_BATCHES = 128  # a segment is about so many batches, and at least
_SEGMENT = 1 << 17  # so many pairs
_LOOK = 50_000  # pairs that shapes and the fill rate of the report are computed from
_DRAWN = 4000  # the same, where they have to be encoded first
_PACKED = 4  # average pairs that a packed row holds at least
_AHEAD = 4  # batches made before they are asked for


class Position(NamedTuple):
    """Where a run stands: global counts, whatever the number of processes."""

    epoch: int = 0
    examples: int = 0  # of this epoch, that have been in a batch


class Planned(NamedTuple):
    """One batch before its ids are put together."""

    bucket: Bucket
    encoded: Encoded
    pairs: np.ndarray  # int64 [n], in encoded
    rows: np.ndarray  # int64 [n], ascending
    after: Position


class TrainData(NamedTuple):
    """Everything the training stream is made of, and what was left out."""

    encoded: Encoded
    kept: np.ndarray  # int64: numbers of the pairs that are trained on
    order: EpochOrder
    buckets: list[Bucket]
    segment: int  # examples after which no row is left waiting for a batch
    config: Config
    resampled: Resampled | None
    row_multiple: int  # rows are filled up to a multiple of this, with filler of weight 0
    dropped: dict[str, int]  # pairs left out, by reason
    batches_per_epoch: float  # estimated, where there are many
    fill: float  # real source and target tokens over all slots
    report: str

    def summary(self) -> dict[str, Any]:
        """Counts and shapes, to be saved with the run."""
        return {
            "kept": len(self.kept),
            "dropped": self.dropped,
            "examples_per_epoch": self.order.size,
            "batches_per_epoch": round(self.batches_per_epoch, 1),
            "fill": round(self.fill, 4),
            "shapes": [bucket._asdict() for bucket in self.buckets],
        }


def train_data(
    corpus: Corpus, tokenizer: Tokenizer, config: Config, row_multiple: int
) -> TrainData:
    """Encode, or find what is encoded; filter; choose the shapes of batches.

    Args:
        corpus: the training pairs.
        tokenizer: its vocabulary gives the ids.
        config: limits, batch size and seed.
        row_multiple: devices that share a batch.

    Raises:
        ConfigError: nothing is left to train on, or the devices do not divide the batches.
    """
    data = config.data
    with_source, sampling = config.model.encoder_layers > 0, data.subword_sampling > 0
    store = open_store(corpus, tokenizer, with_source, sampling, data.cache_dir)
    kept, dropped = _filter(store, data)
    total = len(store.identical)
    always = ("empty", "too long")
    shown = [f"{n} {reason}" for reason, n in dropped.items() if n or reason in always]
    report = f"kept {len(kept)} of {total} training pairs ({', '.join(shown)})"
    if not len(kept):
        raise ConfigError(f"--data.max-source-tokens, --data.max-target-tokens: {report}")
    if len(kept) < total / 2:
        logger.warning("less than half of the training pairs is left: %s", report)
    warn_if_shifted("training", store.encoded)
    lengths = _some_lengths(store.encoded, kept)
    resampled = Resampled(store, tokenizer, corpus, config) if sampling else None
    if resampled:  # drawn sentences are longer than the likeliest
        some = kept[np.arange(min(len(kept), _DRAWN)) * len(kept) // min(len(kept), _DRAWN)]
        limits = data.max_source_tokens, data.max_target_tokens
        drawn = _lengths_of(resampled.draw(0, some, limits))
        lengths = np.concatenate([drawn, lengths.max(0, keepdims=True)])
    buckets = _shapes(lengths, data)
    _check_rows(buckets, data, row_multiple)
    per_batch = data.global_batch_tokens / lengths.max(1).mean()
    segment = max(_SEGMENT, int(_SEGMENT_BATCHES * per_batch))
    made = TrainData(
        encoded=store.encoded,
        kept=kept,
        order=_order(corpus, kept, config.seed),
        buckets=buckets,
        segment=-(-segment // _WINDOW) * _WINDOW,
        config=config,
        resampled=resampled,
        row_multiple=row_multiple,
        dropped=dropped,
        batches_per_epoch=0,
        fill=0,
        report=report,
    )
    batches, fill = _measure(made)
    shapes = " ".join(f"{b.rows}x({b.src_length}+{b.tgt_length})" for b in buckets)
    report += f"; {batches:.0f} batches an epoch, fill {fill:.1%}, shapes {shapes}"
    return made._replace(batches_per_epoch=batches, fill=fill, report=report)


def planned(data: TrainData, position: Position) -> Iterator[Planned]:
    """Batches from a position on, without end.

    Raises:
        ConfigError: no batch of this data ends at the position.
    """
    epoch, done = position
    while done <= data.order.size:
        count = done // data.segment * data.segment
        for bucket, encoded, rows in _segment(data, epoch, count):
            before, count = count, count + sum(map(len, rows))
            if before < done < count:
                break
            if before == done:
                done = count
                yield _planned(bucket, encoded, rows, Position(epoch, count))
        if count < done or count > done:
            break
        if done == data.order.size:
            epoch, done = epoch + 1, 0
    raise ConfigError(
        f"--workdir: the run stands after {done} examples of epoch {epoch}, where no batch of "
        "this data ends; allowed: the data and batch sizes that it was started with"
    )


def train_batches(
    data: TrainData, position: Position, count: int, shard: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Batch, Position]]:
    """The next `count` batches, made ahead in a thread, each with the position after it.

    Args:
        data: from train_data.
        position: of the run, from its checkpoint.
        count: number of batches.
        shard: index and number of the shares into which the rows of each batch are cut; every
            share has the same number of batches and of rows, some of them filler.
    """
    source = itertools.islice(planned(data, position), count)
    return _ahead((_share(data, plan, shard), plan.after) for plan in source)


def warn_if_shifted(name: str, encoded: Encoded) -> None:
    """Say where source and target seem to be shifted by a line: the pairs are used as they are."""
    if not len(encoded.src_ids):
        return
    for start in range(0, len(encoded.src_ends) - 1, _SEGMENT):
        stop = min(start + _SEGMENT, len(encoded.src_ends) - 1)
        for first, last in shifted_stretches(encoded.lengths_of(np.arange(start, stop))):
            logger.warning(
                "%s pairs %d to %d: by their lengths, source and target seem to be shifted "
                "against each other by a line",
                *(name, start + first, start + last),
            )


def eval_batches(encoded: Encoded, batch_tokens: int, row_multiple: int) -> Iterator[Batch]:
    """Every pair once, nothing filtered, few shapes, the last rows filled up."""
    lengths = encoded.lengths
    if not len(lengths):
        return
    buckets = choose_buckets(lengths, 2, batch_tokens, row_multiple)
    for bucket, pairs in in_buckets(lengths, buckets):
        yield collate(encoded, _filled(bucket, row_multiple), pairs)


def _filter(store: Store, config: DataConfig) -> tuple[np.ndarray, dict[str, int]]:
    """Numbers of the pairs that stay, in a file that has no name, and what was dropped."""
    off = np.zeros(0, bool)
    repeated = repeats_of(store.hashes) if config.drop_duplicates else off
    dropped: dict[str, int] = dict.fromkeys(REASONS, 0)
    total = len(store.identical)
    with tempfile.TemporaryFile() as file:  # the mapping outlives it
        for start in range(0, total, _SEGMENT):
            stop = min(start + _SEGMENT, total)
            lengths = store.encoded.lengths_of(np.arange(start, stop))
            seen = repeated[start:stop] if len(repeated) else np.zeros(len(lengths), bool)
            kept, reasons = keep(Marks(lengths, store.identical[start:stop], seen), config)
            file.write((np.flatnonzero(kept) + start).tobytes())
            dropped = {reason: dropped[reason] + reasons[reason] for reason in REASONS}
        file.flush()
        if total == sum(dropped.values()):
            return np.zeros(0, np.int64), dropped
        return np.asarray(np.memmap(file, np.int64, "r")), dropped


def _some_lengths(encoded: Encoded, kept: np.ndarray) -> np.ndarray:
    """Lengths of pairs evenly spread over what is kept, and of the longest on each side."""
    if len(kept) <= _LOOK:
        return encoded.lengths_of(kept)
    found = [encoded.lengths_of(kept[np.arange(_LOOK) * len(kept) // _LOOK])]
    for start in range(0, len(kept), _SEGMENT):
        lengths = encoded.lengths_of(kept[start : start + _SEGMENT])
        found.append(lengths[lengths.argmax(0)])
    return np.concatenate(found)


def _shapes(lengths: np.ndarray, config: DataConfig) -> list[Bucket]:
    tokens, multiple = config.global_batch_tokens, config.row_multiple
    if config.batching == "packed":
        allowed = max(config.max_source_tokens, config.max_target_tokens)
        several = min(tokens, round(_PACKED * float(lengths.mean(0).max())))
        length = config.packed_length or max(allowed, several)
        return [packed_shape(lengths, length, tokens, multiple)]
    if config.pairs_per_row == 1:
        return choose_buckets(lengths, config.num_buckets, tokens, multiple)
    most = config.pairs_per_row
    return shared_shapes(lengths, config.num_buckets, tokens, multiple, most)


def _check_rows(buckets: list[Bucket], config: DataConfig, row_multiple: int) -> None:
    """Filler rows must not take more memory than the user has allowed for."""
    for bucket in buckets:
        longest = max(bucket.src_length, bucket.tgt_length)
        if _filled(bucket, row_multiple).rows * longest <= config.global_batch_tokens:
            continue
        divides = config.row_multiple % row_multiple == 0
        if divides or bucket.rows < row_multiple:
            rows = config.row_multiple if divides else row_multiple
            raise ConfigError(
                f"--data.global-batch-tokens: got {config.global_batch_tokens}, allowed: at least "
                f"{rows * longest}: {rows} rows of {longest} tokens, for the {row_multiple} "
                "devices that share a batch"
            )
        raise ConfigError(
            f"--data.row-multiple: got {config.row_multiple}, allowed: a multiple of the "
            f"{row_multiple} devices that share a batch; filler rows would exceed "
            f"--data.global-batch-tokens ({config.global_batch_tokens})"
        )


def _filled(bucket: Bucket, row_multiple: int) -> Bucket:
    return bucket._replace(rows=-(-bucket.rows // row_multiple) * row_multiple)


def _order(corpus: Corpus, kept: np.ndarray, seed: int) -> EpochOrder:
    """The mixture of what is kept of each part."""
    ends = np.searchsorted(kept, np.cumsum([0] + [len(part.pairs) for part in corpus.parts]))
    sizes: list[int] = np.diff(ends).tolist()
    shares = [part.weight for part in corpus.parts] if corpus.mixed else sizes
    return EpochOrder(sizes, repeats(sizes, [share or 1 for share in shares]), seed)


_Rows = list[np.ndarray]


def _segment(data: TrainData, epoch: int, begin: int) -> Iterator[tuple[Bucket, Encoded, _Rows]]:
    """The batches of a segment: window by window, pairs become rows, and rows become batches as
    soon as there are enough of one shape. What is left at its end moves up to wider shapes."""
    end = min(begin + data.segment, data.order.size)
    random = np.random.default_rng([data.config.seed, epoch, begin])
    shapes = np.array([bucket[1:] for bucket in data.buckets])
    waiting: list[_Rows] = [[] for _ in data.buckets]
    drawn: dict[int, Sentences] = {}

    def batch(shape: int, rows: _Rows) -> tuple[Bucket, Encoded, _Rows]:
        if data.resampled is None:
            return data.buckets[shape], data.encoded, rows
        places = np.concatenate(rows).tolist()
        own_ids = [drawn.pop(i) for i in places]
        numbers = np.arange(len(places))
        own = np.split(numbers, np.cumsum([len(row) for row in rows])[:-1])
        return data.buckets[shape], as_encoded(own_ids, data.encoded.start), own

    for start in range(begin, end, _WINDOW):
        stop = min(start + _WINDOW, end)
        pairs = data.kept[data.order.numbers(epoch, start, stop)]
        if data.resampled is None:
            lengths = data.encoded.lengths_of(pairs)
        else:
            widest = data.buckets[-1]
            longest = widest.src_length, widest.tgt_length
            sentences = data.resampled.draw(epoch, pairs, longest)
            pairs = np.arange(start, stop)
            drawn.update(zip(pairs.tolist(), sentences, strict=True))
            lengths = _lengths_of(sentences)
        row_of, shape_of = pack(lengths, shapes, data.config.data.pairs_per_row)
        counts = np.bincount(row_of, minlength=len(shape_of))
        rows = np.split(pairs[np.argsort(row_of, kind="stable")], np.cumsum(counts)[:-1])
        for row in random.permutation(len(rows)).tolist():
            shape = int(shape_of[row])
            waiting[shape].append(rows[row])
            if len(waiting[shape]) == data.buckets[shape].rows:
                yield batch(shape, waiting[shape])
                waiting[shape] = []
    left: _Rows = []
    for shape, bucket in enumerate(data.buckets):
        left += waiting[shape]
        while len(left) >= bucket.rows:
            yield batch(shape, left[: bucket.rows])
            left = left[bucket.rows :]
    if left:
        yield batch(len(data.buckets) - 1, left)


def _lengths_of(sentences: list[Sentences]) -> np.ndarray:
    """int64 [n, 2]."""
    return np.array([(len(source), len(target)) for source, target in sentences], np.int64)


def _planned(bucket: Bucket, encoded: Encoded, rows: _Rows, after: Position) -> Planned:
    number = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return Planned(bucket, encoded, np.concatenate(rows), number, after)


def _share(data: TrainData, plan: Planned, shard: tuple[int, int]) -> Batch:
    """One shard's rows of a batch."""
    index, count = shard
    rows = _filled(plan.bucket, math.lcm(data.row_multiple, count)).rows // count
    mine = slice(*np.searchsorted(plan.rows, [index * rows, (index + 1) * rows]))
    one_a_row = data.config.data.pairs_per_row == 1 and data.config.data.batching == "bucketed"
    place = plan.rows[mine] - index * rows
    return collate(
        plan.encoded,
        plan.bucket._replace(rows=rows),
        plan.pairs[mine],
        None if one_a_row else place,
    )


def _measure(data: TrainData) -> tuple[float, float]:
    """Batches an epoch and fill, from the first examples of an epoch."""
    slots = tokens = batches = examples = 0
    for bucket, encoded, rows in _segment(data, 0, 0):
        pairs = np.concatenate(rows)
        tokens += int(encoded.lengths_of(pairs).sum())
        slots += bucket.rows * (bucket.src_length + bucket.tgt_length)
        batches, examples = batches + 1, examples + len(pairs)
        if examples >= (_LOOK if data.resampled is None else _DRAWN):
            break
    return batches * data.order.size / examples, tokens / slots


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items, made in a thread before they are asked for; its errors are raised here."""
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
    stopped = threading.Event()

    def put(item: Any, error: BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                made.put((item, error), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(item, None):
                    return
            put(None, StopIteration())
        except BaseException as error:
            put(None, error)

    threading.Thread(target=work, daemon=True, name="batches").start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
