"""How full batches are and how fast one core makes them, beside Grain; memory of a large corpus.

    make bench NAME=data ARGS='--pairs train.en train.de --pairs other.en other.de'
    make bench NAME=data ARGS='--large 2000000'

The first prints, for each corpus and in one process on one core, the fill rate (real source and
target tokens over all slots) and source and target tokens a second of every way to make batches,
then the same of SentencePiece alone and of Grain (pip install grain). The second writes a corpus of
so many pairs, trains a tokenizer, encodes it, and then measures a fresh process: seconds to the
first batch, and resident memory over the idle process after an epoch.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, TokenizerConfig
from transformer_jax.data.pipeline import Position, train_batches, train_data
from transformer_jax.data.sources import load_splits
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.types import Batch

_SECONDS = 6.0  # of each measurement, at most
LAYOUTS: dict[str, dict[str, Any]] = {
    "bucketed": {},
    "bucketed, one pair a row": {"pairs_per_row": 1},
    "packed": {"batching": "packed"},
    "on the fly (pieces drawn anew)": {"subword_sampling": 0.1},
}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs=2, action="append", default=[], metavar=("SRC", "TGT"))
    parser.add_argument("--large", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a fresh process of --large
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.measure:
        measure_large(Path(options.measure))
    for source, target in options.pairs:
        measure_corpus(source, target, options)
    if options.large:
        large(options.large, options)


def text_config(source: str, target: str, cache: str, options: Any, **fields: Any) -> Config:
    """A config of two files."""
    data = DataConfig(
        train_source=(source,),
        train_target=(target,),
        max_source_tokens=options.max_tokens,
        max_target_tokens=options.max_tokens,
        global_batch_tokens=options.batch_tokens,
        cache_dir=cache,
        **fields,
    )
    return Config(data=data, tokenizer=TokenizerConfig(vocab_size=options.vocab_size))


def measure_corpus(source: str, target: str, options: Any) -> None:
    """One table."""
    with tempfile.TemporaryDirectory() as cache:
        config = text_config(source, target, cache, options)
        corpus = load_splits(config.data).train
        tokenizer = Tokenizer.train(corpus, config.tokenizer)
        print(f"\n{source}: {len(corpus)} pairs, batches of {options.batch_tokens} tokens a side")
        print(f"{'':34} {'fill':>7} {'shapes':>7} {'tokens/s':>11}")
        for name, fields in LAYOUTS.items():
            config = text_config(source, target, cache, options, **fields)
            data = train_data(corpus, tokenizer, config, 1)
            fill = epoch_fill(train_batches(data, Position(), 10**9), data.order.size)
            rate = tokens_per_sec(batch for batch, _ in train_batches(data, Position(), 10**9))
            row(name, fill, len(data.buckets), rate)
        texts = [text for pair in corpus for text in pair]
        row("SentencePiece alone", None, None, sentencepiece_rate(tokenizer, texts))
        try:
            import grain
        except ImportError:
            print("Grain is not installed")
            return
        lengths = data.encoded.lengths
        pairs = [
            {"src": data.encoded.src_ids[a:b].copy(), "tgt": data.encoded.tgt_ids[c:d].copy()}
            for a, b, c, d in zip(
                data.encoded.src_ends[:-1],
                data.encoded.src_ends[1:],
                data.encoded.tgt_ends[:-1],
                data.encoded.tgt_ends[1:],
                strict=True,
            )
        ]
        keep = (lengths <= options.max_tokens).all(1)
        pairs = [pair for pair, kept in zip(pairs, keep, strict=True) if kept]
        for name, fill, rate in grain_rates(grain, pairs, options.max_tokens, options.batch_tokens):
            row(name, fill, 1, rate)


def row(name: str, fill: float | None, shapes: int | None, rate: float) -> None:
    """One line of the table."""
    shown = "" if fill is None else f"{fill:.1%}"
    shapes_shown = "" if shapes is None else str(shapes)
    print(f"{name:34} {shown:>7} {shapes_shown:>7} {rate:>11,.0f}", flush=True)


def real_and_slots(batch: Batch) -> tuple[int, int]:
    """Source and target tokens, and slots."""
    real = int((batch.src_segments > 0).sum() + (batch.tgt_segments > 0).sum())
    return real, batch.src_segments.size + batch.tgt_segments.size


def epoch_fill(batches: Iterator[tuple[Batch, Position]], size: int) -> float:
    """Real tokens over slots of one whole epoch."""
    counts = np.zeros(2)
    for batch, position in batches:
        counts += real_and_slots(batch)
        if position == (0, size):
            break
    return counts[0] / counts[1]


def tokens_per_sec(batches: Iterator[Batch]) -> float:
    """Real tokens of both sides a second, with nothing else to do."""
    count, start = 0, time.perf_counter()
    for batch in batches:
        count += real_and_slots(batch)[0]
        if time.perf_counter() - start > _SECONDS:
            break
    return count / (time.perf_counter() - start)


def sentencepiece_rate(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Tokens a second of the library, all texts in one call."""
    start = time.perf_counter()
    count = sum(len(ids) for ids in tokenizer.source.encode(texts))
    return count / (time.perf_counter() - start)


def grain_rates(
    grain: Any, pairs: list[dict[str, np.ndarray]], length: int, batch_tokens: int
) -> Iterator[tuple[str, float | None, float]]:
    """Reading alone, with and without its threads, and its best-fit packing."""

    def real(element: dict[str, np.ndarray]) -> int:
        return len(element["src"]) + len(element["tgt"])

    source = grain.MapDataset.source(pairs).shuffle(seed=0).repeat()
    for name, options in (
        ("Grain, reading, num_threads=0", grain.ReadOptions(num_threads=0)),
        ("Grain, reading, default threads", grain.ReadOptions()),
    ):
        yield name, None, timed(iter(source.to_iter_dataset(options)), real)
    packed = grain.experimental.BestFitPackIterDataset(
        source.to_iter_dataset(grain.ReadOptions(num_threads=0)),
        length_struct={"src": length, "tgt": length},
        num_packing_bins=max(8, batch_tokens // length),
    )
    counts = np.zeros(2)

    def count(element: Any) -> int:
        nonlocal counts
        segments = [element[f"{side}_segment_ids"] for side in ("src", "tgt")]
        tokens = sum(int((x > 0).sum()) for x in segments)
        counts += tokens, sum(x.size for x in segments)
        return tokens

    rate = timed(iter(packed), count)
    yield f"Grain, best-fit packing, rows of {length}", counts[0] / counts[1], rate


def timed(elements: Iterator[Any], tokens: Callable[[Any], int]) -> float:
    """Tokens a second of an endless iterator."""
    count, start = 0, time.perf_counter()
    for element in elements:
        count += tokens(element)
        if time.perf_counter() - start > _SECONDS:
            break
    return count / (time.perf_counter() - start)


def large(count: int, options: Any) -> None:
    """Write, encode, and measure in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        draw, root = random.Random(0), Path(directory)
        words = ["".join(draw.choices("abcdefghijklmnoprstuw", k=2 + i % 9)) for i in range(20_000)]
        with open(root / "a", "w") as source, open(root / "b", "w") as target:
            for _ in range(count):
                chosen = draw.choices(words, k=max(2, round(draw.gammavariate(4, 3))))
                source.write(" ".join(chosen) + "\n")
                target.write(" ".join(word[::-1] for word in chosen) + "\n")
        config = text_config(str(root / "a"), str(root / "b"), str(root / "cache"), options)
        start = time.perf_counter()
        corpus = load_splits(config.data).train
        sample = [pair for pair, _ in zip(corpus, range(100_000), strict=False)]
        Tokenizer.train(sample, config.tokenizer).save(root / "tokenizer")
        trained = time.perf_counter()
        (root / "options.json").write_text(json.dumps(vars(options)))
        command = [sys.executable, __file__, "--measure", directory]
        print(f"\n{count} pairs; tokenizer {trained - start:.1f} s")
        for name in ("encoding", "once cached"):
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{name}: {result.stdout.strip()}", flush=True)


def measure_large(root: Path) -> None:
    """In a fresh process: the first batch, then an epoch (or 60 s of it)."""
    options = argparse.Namespace(**json.loads((root / "options.json").read_text()))
    idle = resident()
    start = time.perf_counter()
    config = text_config(str(root / "a"), str(root / "b"), str(root / "cache"), options)
    corpus, tokenizer = load_splits(config.data).train, Tokenizer.load(root / "tokenizer")
    data = train_data(corpus, tokenizer, config, 1)
    first, most, tokens, position = 0.0, 0, 0, Position()
    for batch, position in train_batches(data, Position(), 10**9):
        first = first or time.perf_counter() - start
        tokens += real_and_slots(batch)[0]
        if position == (0, data.order.size) or time.perf_counter() - start - first > 60:
            break
    seconds = time.perf_counter() - start - first
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"first batch after {first:.1f} s; {position.examples} pairs, {tokens / seconds:,.0f} "
        f"tokens/s; resident {resident():.0f} MB, at most {most:.0f} MB, {idle:.0f} MB when idle"
    )


def resident() -> float:
    """MB in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
