"""Training step beside PyTorch's, in one interleaved run: the paper's base model on this machine.

    make bench NAME=train_step ARGS='[--rounds 5] [--rows 32] [--length 64] [--torch-compile]'

Each contender is a process of its own that makes three steps when told to; the parent tells them in
turn (A B C, B C A, ...), so that a drifting machine drifts for all. The first of the three is not
counted: it finds the caches full of another's data, as no step of a run does.
Same sizes and batch for all: d_model 512, 8 heads, d_ff 2048, 6+6 layers, vocabulary 8,000 tied,
label smoothing 0.1, dropout 0.1. torch.nn.Transformer also drops attention weights and hidden
units, as it does by default; `ours, all dropout` does so too. It needs torch.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from transformer_jax.command_line import HUGE_PAGES

_COUNTED = 2  # steps of a turn
V, D, H, F, LAYERS, DROPOUT, SMOOTHING = 8000, 512, 8, 2048, 6, 0.1, 0.1


def ours(rows: int, length: int, **changes) -> Callable[[], float]:
    """This project's compiled step."""
    import jax
    import numpy as np

    from transformer_jax.config import Config, MeshConfig, ModelConfig, OptimizerConfig
    from transformer_jax.model import Model
    from transformer_jax.sharding import make_mesh, put_batch
    from transformer_jax.train.optimizer import make_optimizer
    from transformer_jax.train.state import abstract_state, new_state
    from transformer_jax.train.step import compile_train_step
    from transformer_jax.types import Batch

    config = Config(
        model=ModelConfig(vocab_size=V, **changes), optimizer=OptimizerConfig(name="adamw")
    )
    mesh = make_mesh(MeshConfig())
    model, optimizer = Model(config.model), make_optimizer(config)
    abstract = abstract_state(model, optimizer, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(lambda: new_state(model, optimizer, 0), out_shardings=shardings)()
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, V, (rows, length)).astype(np.int32) for _ in range(3)]
    ones = np.ones_like(ids[0])
    batch = put_batch(mesh, Batch(ids[0], ones, ids[1], ids[2], ones))
    start = time.perf_counter()
    compiled = compile_train_step(model, optimizer, config, mesh, abstract)
    compiled = compiled.lower(state, batch).compile()
    report = {"compile_secs": time.perf_counter() - start}

    def step() -> float:
        nonlocal state
        start = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        return time.perf_counter() - start

    step.report = report
    return step


def torchs(rows: int, length: int, fused: bool, compiled: bool) -> Callable[[], float]:
    """torch.nn.Transformer, tied embeddings, AdamW."""
    import torch

    torch.manual_seed(0)

    class Translator(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(V, D)
            torch.nn.init.normal_(self.table.weight, std=D**-0.5)
            self.transformer = torch.nn.Transformer(
                D, H, LAYERS, LAYERS, F, DROPOUT, batch_first=True
            )
            self.dropout = torch.nn.Dropout(DROPOUT)
            position = torch.arange(length)[:, None]
            angle = position / 10000 ** (torch.arange(0, D, 2) / D)
            self.register_buffer("waves", torch.stack([angle.sin(), angle.cos()], -1).flatten(1))
            causal = torch.nn.Transformer.generate_square_subsequent_mask(length)
            self.register_buffer("causal", causal)

        def embed(self, ids):
            return self.dropout(self.table(ids) * math.sqrt(D) + self.waves)

        def forward(self, src, tgt_in, tgt_out):
            hidden = self.transformer(
                self.embed(src), self.embed(tgt_in), tgt_mask=self.causal, tgt_is_causal=True
            )
            logits = hidden @ self.table.weight.T
            return torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), tgt_out.flatten(), label_smoothing=SMOOTHING
            )

    model = Translator().train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.98), 1e-9, fused=fused)
    forward = torch.compile(model) if compiled else model
    src, tgt_in, tgt_out = (torch.randint(4, V, (rows, length)) for _ in range(3))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        forward(src, tgt_in, tgt_out).backward()
        optimizer.step()
        return time.perf_counter() - start

    start = time.perf_counter()
    if compiled:
        step()
    step.report = {"compile_secs": time.perf_counter() - start if compiled else 0.0}
    return step


def matmul(rows: int, length: int) -> Callable[[], float]:
    """A large matmul: what the machine gives at most."""
    import jax
    import jax.numpy as jnp

    a = jnp.ones((4096, 2048))
    b = jnp.ones((2048, 4096))
    product = jax.jit(lambda a, b: a @ b)
    product(a, b).block_until_ready()

    def step() -> float:
        start = time.perf_counter()
        product(a, b).block_until_ready()
        return time.perf_counter() - start

    step.report = {"compile_secs": 0.0}
    return step


CONTENDERS = {
    "ours": lambda r, n: ours(r, n),
    "ours, all dropout": lambda r, n: ours(
        r, n, attention_dropout=DROPOUT, activation_dropout=DROPOUT
    ),
    "ours, small pages": lambda r, n: ours(r, n),
    "torch eager": lambda r, n: torchs(r, n, fused=False, compiled=False),
    "torch fused AdamW": lambda r, n: torchs(r, n, fused=True, compiled=False),
    "torch compiled": lambda r, n: torchs(r, n, fused=True, compiled=True),
    "matmul": matmul,
}


def work(name: str, rows: int, length: int) -> None:
    """A contender's process: one JSON line when ready, then one for each line read."""
    step = CONTENDERS[name](rows, length)
    print(json.dumps(step.report), flush=True)
    for _ in sys.stdin:
        step()
        secs = [step() for _ in range(_COUNTED)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"secs": secs, "peak_gib": peak}), flush=True)


def flops(rows: int, length: int) -> float:
    """Multiply-adds of forward and backward, times two: matmuls with weights, and attention."""
    N = rows * length
    encoder = 4 * D * D + 2 * D * F
    decoder = 8 * D * D + 2 * D * F
    weights = LAYERS * (encoder + decoder) * N + V * D * N
    scores = LAYERS * 3 * 2 * length * D * N
    return 6.0 * (weights + scores)


def main() -> None:
    """Run the contenders in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--torch-compile", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.rows, options.length)
        return
    names = [n for n in CONTENDERS if options.torch_compile or n != "torch compiled"]
    size = ["--rows", str(options.rows), "--length", str(options.length)]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": ""}
    # As train.py starts itself. PyTorch keeps its memory and gains nothing by it.
    asks = lambda name: HUGE_PAGES if name in ("ours", "ours, all dropout") else {}
    processes, reports = {}, {}
    for name in names:  # one after the other, so that each compiles on a quiet machine
        processes[name] = subprocess.Popen(
            [sys.executable, __file__, "--work", name, *size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment | asks(name),
        )
        reports[name] = json.loads(processes[name].stdout.readline())
    secs: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(options.rounds):
        first = round_number % len(names)  # what runs before may matter: no one is always first
        for name in names[first:] + names[:first]:
            process = processes[name]
            process.stdin.write("step\n")
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
            secs[name] += result["secs"]
            reports[name]["peak_gib"] = result["peak_gib"]
    peak = 2 * 4096 * 2048 * 4096 / min(secs["matmul"])
    tokens, work_done = options.rows * options.length, flops(options.rows, options.length)
    print(f"matmul peak {peak / 1e9:.0f} GFLOP/s; a step is {work_done / 1e9:.0f} GFLOP")
    print("| contender | median s | min s | target tokens/s | of the peak | compile s | peak GiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in names[:-1]:
        times = secs[name]
        middle = statistics.median(times)
        print(
            f"| {name} | {middle:.2f} | {min(times):.2f} | {tokens / middle:.0f} "
            f"| {work_done / middle / peak:.0%} | {reports[name]['compile_secs']:.1f} "
            f"| {reports[name]['peak_gib']:.1f} |"
        )
    best = min(statistics.median(secs[n]) for n in names if n.startswith("torch"))
    print(f"ours is {best / statistics.median(secs['ours']):.2f} times the best of torch")
    for process in processes.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
