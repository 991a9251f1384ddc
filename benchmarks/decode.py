"""Decoding beside CTranslate2 and transformers, in one interleaved run with the same weights.

    make bench NAME=decode                                          # base size, 30 -> 40 ids
    make bench NAME=decode ARGS='--checkpoint RUN --input FILE --sentences 1000'    # a trained run
    make bench NAME=decode ARGS='--checkpoint RUN --input FILE --at-base-size'      # the same, wide

With --at-base-size the trained model is blown up to the paper's base size without a change of what
it computes: every activation stands there several times over, and further layers add nothing. So
base-size arithmetic meets sentences that end where a trained model ends them.

Each contender is a process of its own that decodes the whole input when told to; the parent tells
them in turn (A B C A B C ...), so that a drifting machine drifts for all. Before the clock starts
each has decoded the input once, so nothing is compiled under it. Token ids go in and come out:
tokenizers are not measured. All search alike: W hypotheses, log_prob / length ** alpha, the
candidates and the stopping of CTranslate2. It needs requirements-oracles.txt.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

THREADS = os.cpu_count() or 1
LIMIT = 256  # tokens of a translation, for all alike
Decode = Callable[[list[list[int]], dict[str, Any]], list[list[int]]]


def ours(directory: Path, job: dict[str, Any]) -> Decode:
    """This project's engine."""
    from transformer_jax.decode.engine import Engine, Request
    from transformer_jax.decode.search import BeamSearch
    from transformer_jax.decode.trained import load_trained

    run = load_trained(directory / "run", dtype=job["dtype"])
    from transformer_jax.model import Model

    tokenizer = run.tokenizer
    engine = Engine(
        [(Model(run.config.model), run.params)], tokenizer.vocab_size, run.mesh, tokenizer.special
    )
    search = BeamSearch(
        job["beam"],
        tokenizer.eos_id,
        job["alpha"],
        "power",
        num_hypotheses=1,
        min_length=job["fixed"],
        rule="ctranslate2",
    )

    def decode(sources: list[list[int]], job: dict[str, Any]) -> list[list[int]]:
        requests = [Request(ids, job["fixed"] or LIMIT) for ids in sources]
        found = engine.decode(search, requests, job["batch_tokens"])
        job["log_probs"] = [some[0].log_prob for some in found]
        return [some[0].ids for some in found]

    return decode


def ctranslate2(directory: Path, job: dict[str, Any], kind: str) -> Decode:
    """CTranslate2 with weights of one kind."""
    import ctranslate2 as library

    from transformer_jax.data.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(directory / "run" / "tokenizer")
    translator = library.Translator(
        str(directory / kind), device="cpu", compute_type=kind, intra_threads=THREADS
    )
    vocabulary = json.loads((directory / kind / "shared_vocabulary.json").read_text("utf-8"))
    number = {piece: i for i, piece in enumerate(vocabulary)}

    def decode(sources: list[list[int]], job: dict[str, Any]) -> list[list[int]]:
        eos = [] if job["source_eos_added"] else [tokenizer.eos_id]
        results = translator.translate_batch(
            [[vocabulary[i] for i in ids[:-1] + eos] for ids in sources],
            beam_size=job["beam"],
            length_penalty=job["alpha"],
            max_batch_size=job["batch"],
            max_decoding_length=job["fixed"] or LIMIT,
            min_decoding_length=job["fixed"] or 1,
            return_scores=True,
            replace_unknowns=False,
        )
        ids = [[number[piece] for piece in r.hypotheses[0]] for r in results]
        lengths = [len(x) + (not job["fixed"]) for x in ids]
        job["log_probs"] = [
            r.scores[0] * length ** job["alpha"] for r, length in zip(results, lengths, strict=True)
        ]
        return ids if job["fixed"] else [[*x, tokenizer.eos_id] for x in ids]

    return decode


def transformers(directory: Path, job: dict[str, Any]) -> Decode:
    """transformers' MarianMTModel.generate, eager torch, sorted by length."""
    import torch
    import transformers as library

    library.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    model = library.MarianMTModel.from_pretrained(directory / "marian").eval()
    pad = model.config.pad_token_id

    @torch.inference_mode()
    def decode(sources: list[list[int]], job: dict[str, Any]) -> list[list[int]]:
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        results: list[list[int]] = [[] for _ in sources]
        for start in range(0, len(order), job["batch"]):
            group = order[start : start + job["batch"]]
            width = max(len(sources[i]) for i in group)
            ids = torch.tensor([sources[i] + [pad] * (width - len(sources[i])) for i in group])
            found = model.generate(
                input_ids=ids,
                attention_mask=(ids != pad).long(),
                num_beams=job["beam"],
                length_penalty=job["alpha"],
                early_stopping=True,
                max_new_tokens=job["fixed"] or LIMIT,
                min_new_tokens=job["fixed"] or None,
            )
            for i, row in zip(group, found.tolist(), strict=True):
                row = row[1:]
                end = row.index(model.config.eos_token_id) + 1 if not job["fixed"] else len(row)
                results[i] = row[:end]
        return results

    return decode


def matmul(directory: Path, job: dict[str, Any]) -> Decode:
    """A large matmul: what the machine gives at most."""
    import jax
    import jax.numpy as jnp

    a, b = jnp.ones((4096, 2048)), jnp.ones((2048, 4096))
    product = jax.jit(lambda a, b: a @ b)

    def decode(sources: list[list[int]], job: dict[str, Any]) -> list[list[int]]:
        product(a, b).block_until_ready()
        return []

    return decode


CONTENDERS: dict[str, Callable[[Path, dict[str, Any]], Decode]] = {
    "ours": ours,
    "CTranslate2 float32": lambda d, j: ctranslate2(d, j, "float32"),
    "CTranslate2 int8": lambda d, j: ctranslate2(d, j, "int8"),
    "transformers": transformers,
    "matmul": matmul,
}


def work(name: str, directory: Path) -> None:
    """A contender's process: a JSON line when ready, then one for each line read."""
    job = json.loads((directory / "job.json").read_text("utf-8"))
    sources = job["sources"]
    if name == "transformers":  # slow: a part of the input says as much
        sources = sources[:: max(1, len(sources) // job["slow_sentences"])]
    start = time.perf_counter()
    decode = CONTENDERS[name](directory, job)
    loaded = time.perf_counter()
    decode(sources, job)
    first = time.perf_counter() - loaded
    print(json.dumps({"load_secs": loaded - start, "first_secs": first}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        found = decode(sources, job)
        secs = time.perf_counter() - start
        report = {"secs": secs, "sentences": len(sources), "tokens": sum(map(len, found))}
        print(json.dumps(report | {"ids": found, "log_probs": job.get("log_probs")}), flush=True)


def prepare(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The run, its exports and the input; what all contenders read."""
    import numpy as np
    from base_size import random_run, widened_run

    from transformer_jax import config as configs
    from transformer_jax.data.files import read_lines
    from transformer_jax.data.tokenizer import Tokenizer

    run = directory / "run"
    if options.checkpoint and not options.at_base_size:
        run.symlink_to(Path(options.checkpoint).absolute())
    else:
        run.mkdir()
        if options.checkpoint:
            widened_run(run, options.checkpoint)
        else:
            random_run(run, options.vocabulary)
    exports = {
        "CTranslate2 float32": ("export-ctranslate2", "float32", "--quantization", "float32"),
        "CTranslate2 int8": ("export-ctranslate2", "int8", "--quantization", "int8"),
        "transformers": ("export-marian", "marian"),
    }
    for contender, (command, name, *flags) in exports.items():
        if options.only and contender not in options.only:
            continue
        arguments = ["--checkpoint", run, "--output", directory / name, *flags]
        subprocess.run(
            [sys.executable, "-m", "transformer_jax", command, *map(str, arguments)], check=True
        )
    tokenizer = Tokenizer.load(run / "tokenizer")
    config = configs.load(run / "config.json")
    if options.input:
        lines = [line for line in read_lines(options.input) if line.strip()]
        lines = lines[:: max(1, len(lines) // options.sentences)][: options.sentences]
        sources = [ids[: config.data.max_source_tokens] for ids in tokenizer.encode_source(lines)]
    else:
        draw = np.random.default_rng(0)
        size = (options.sentences, 29)
        sources = draw.integers(tokenizer.start_id + 1, tokenizer.vocab_size, size).tolist()
        sources = [[*ids, tokenizer.eos_id] for ids in sources]
    m = config.model
    square = m.d_model**2
    job = {
        "sources": sources,
        "beam": options.beam,
        "alpha": options.alpha,
        "batch": options.batch,
        "batch_tokens": options.batch_tokens,
        "fixed": 0 if options.input else 40,
        "dtype": options.dtype,
        "slow_sentences": options.slow_sentences,
        "source_eos_added": _adds_eos(directory / "float32"),
        # Multiply-adds with weights, times two, for a source token and for a live target token.
        "flops_source": 2 * m.encoder_layers * (4 * square + 2 * m.d_model * m.d_ff)
        + 4 * m.decoder_layers * square,
        "flops_target": 2 * m.decoder_layers * (6 * square + 2 * m.d_model * m.d_ff)
        + 2 * m.d_model * tokenizer.vocab_size,
    }
    (directory / "job.json").write_text(json.dumps(job), "utf-8")
    return job


def _adds_eos(directory: Path) -> bool:
    path = directory / "config.json"
    return path.exists() and bool(json.loads(path.read_text("utf-8")).get("add_source_eos"))


def compare(found: dict[str, Any], job: dict[str, Any]) -> None:
    """How many best hypotheses are those of CTranslate2, and by how much log_probs differ."""
    if not {"ours", "CTranslate2 float32"} <= found.keys():
        return
    a, b = found["ours"], found["CTranslate2 float32"]
    same = [x == y for x, y in zip(a["ids"], b["ids"], strict=True)]
    apart = [abs(x - y) for x, y in zip(a["log_probs"], b["log_probs"], strict=True)]
    apart = [x for x, is_same in zip(apart, same, strict=True) if is_same]
    print(
        f"ours and CTranslate2 float32: {100 * statistics.mean(same):.1f} % of {len(same)} best "
        f"hypotheses identical, their log_prob at most {max(apart, default=0.0):.1e} apart"
    )


def main() -> None:
    """Run the contenders in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", help="a trained run; absent: base size, random weights")
    parser.add_argument("--at-base-size", action="store_true", help="blow the trained run up")
    parser.add_argument("--input", help="text to translate; absent: random ids, 30 -> 40 tokens")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--slow-sentences", type=int, default=64, help="for transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=0.6)
    parser.add_argument("--batch", type=int, default=64, help="sentences, of the others")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="of ours")
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTENDERS))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, Path(options.directory))
        return
    if options.at_base_size and not options.checkpoint:
        parser.error("--at-base-size: allowed: with --checkpoint")
    names = [n for n in CONTENDERS if not options.only or n in options.only or n == "matmul"]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = prepare(options, directory)
        processes = {
            name: subprocess.Popen(
                [sys.executable, __file__, "--work", name, "--directory", str(directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        }
        ready = {name: json.loads(p.stdout.readline()) for name, p in processes.items()}
        secs: dict[str, list[float]] = {name: [] for name in names}
        found: dict[str, Any] = {}
        for _ in range(options.rounds):
            for name, process in processes.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                found[name] = json.loads(process.stdout.readline())
                secs[name].append(found[name]["secs"])
        for process in processes.values():
            process.stdin.close()
            process.wait()
    peak = 2 * 4096 * 4096 * 2048 / statistics.median(secs.pop("matmul"))
    print(
        f"{len(job['sources'])} sentences, {sum(map(len, job['sources']))} source tokens, "
        f"beam {options.beam}, {THREADS} threads, matmul peak {peak / 1e9:.0f} GFLOP/s"
    )
    print(
        f"{'':22}{'median s':>9}{'tokens/s':>10}{'sent./s':>9}{'ratio':>7}{'peak':>7}{'first s':>9}"
    )
    source_tokens = sum(map(len, job["sources"]))
    for name in secs:
        median, f = statistics.median(secs[name]), found[name]
        share = f["sentences"] / len(job["sources"])
        flops = job["flops_source"] * source_tokens * share
        flops += job["flops_target"] * f["tokens"] * options.beam
        rate = f["tokens"] / median
        base = found["ours"]["tokens"] / statistics.median(secs["ours"]) if "ours" in secs else rate
        print(
            f"{name:22}{median:9.2f}{rate:10.0f}{f['sentences'] / median:9.1f}{base / rate:7.2f}"
            f"{flops / median / peak:7.0%}{ready[name]['first_secs']:9.1f}"
        )
    compare(found, job)


if __name__ == "__main__":
    main()
