"""Two processes of two devices each against one process of four: whole runs over loopback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.checkpoint import load_items, steps_of
from transformer_jax.config import Config, MeshConfig, to_json
from transformer_jax.config import load as load_config
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh, own_rows
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import abstract_state

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG_FILE = """
from transformer_jax import config as configs


def get_config():
    return configs.from_json({json!r})
"""


@pytest.fixture()
def config_file(tiny_run: Config, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG_FILE.format(json=to_json(tiny_run)), encoding="utf-8")
    return path


def start(
    config_file: Path, run_dir: Path, devices: int, rank: int = 0, port: int = 0, *arguments: str
) -> subprocess.Popen[str]:
    """A training process with so many CPU devices; with a port, one of two."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "train.py", "--config", str(config_file), "--workdir", str(run_dir)]
    if port:
        command.append("--distributed")
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
        }
    return subprocess.Popen(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def both(config_file: Path, run_dir: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [start(config_file, run_dir, 2, rank, port, *arguments) for rank in (0, 1)]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    results = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=600)
            results.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return results


def state_of(run_dir: Path, step: int) -> Any:
    config = load_config(run_dir / "config.json")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    abstract = abstract_state(Model(config.model), make_optimizer(config), mesh)
    fingerprint = Tokenizer.load(run_dir / "tokenizer").fingerprint
    return load_items(run_dir / "checkpoints" / str(step), abstract.items(), fingerprint)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    return [{k: v for k, v in line.items() if "per_sec" not in k} for line in lines]


@pytest.mark.slow
def test_two_processes_train_what_one_does(config_file: Path, tmp_path: Path):
    """Bug: each process trains on its own share as if it were all (F121); a hang where only one
    takes part in a sum (F102, F103); lines or files that both write; another BLEU."""
    fewer = "--train.steps 3 --train.eval-every-steps 0 --train.eval-bleu-sentences 2"
    arguments = ("--mesh.fsdp", "2", *fewer.split(), "--decode.beam-size", "1")
    two = ended(both(config_file, tmp_path / "two", *arguments))
    assert [code for code, *_ in two] == [0, 0], two
    one = ended([start(config_file, tmp_path / "one", 4, 0, 0, *arguments)])
    assert one[0][0] == 0, one
    assert "cpu: 4 x " in two[0][2] and "step 3/3" in two[0][2]
    assert "loss" not in two[1][1] + two[1][2], "the second process is silent"
    assert "the same command without --distributed averages and reports" in two[0][2]
    ((code, out, _),) = ended([start(config_file, tmp_path / "two", 2, 0, 0, *arguments)])
    assert (code, "sacreBLEU" in out) == (0, True)
    assert steps_of(tmp_path / "two") == steps_of(tmp_path / "one")
    for got, want in zip(metrics_of(tmp_path / "two"), metrics_of(tmp_path / "one"), strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            if name != "part":
                assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, got, want)
    pairs = zip(
        *(jax.tree.leaves(state_of(tmp_path / name, 3)["params"]) for name in ("two", "one")),
        strict=True,
    )
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both(config_file: Path, tmp_path: Path):
    """Bug: F102: one leaves, the other waits for ever; or they save different steps."""
    run_dir = tmp_path / "run"
    endless = ("--train.steps", "100000", "--train.eval-every-steps", "0")
    processes = both(config_file, run_dir, *endless, "--train.checkpoint-every-steps", "0")
    deadline = time.monotonic() + 120
    log = run_dir / "metrics.jsonl"
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    processes[1].send_signal(signal.SIGTERM)
    results = ended(processes)
    assert [code for code, *_ in results] == [143, 143], results
    last = steps_of(run_dir)[-1]
    assert last > 0 and f"stopped by a signal after step {last}, saved" in results[0][2]
    more = ("--train.steps", str(last + 2), "--train.eval-every-steps", "0")
    results = ended(both(config_file, run_dir, *more))
    assert [code for code, *_ in results] == [0, 0], results
    assert f"resumed from step {last}" in results[0][2]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state_of(run_dir, last + 2)))


def test_a_coordinator_that_nobody_names_is_said_in_one_line(config_file: Path, tmp_path: Path):
    """Bug: --distributed on one machine ends in a traceback, or trains alone."""
    ((code, out, err),) = ended([start(config_file, tmp_path / "run", 1, 0, 0, "--distributed")])
    assert (code, out) == (2, "") and err.startswith("error: --distributed: ")
    assert err.count("\n") == 1 and "JAX_COORDINATOR_ADDRESS" in err


@pytest.mark.parametrize(
    ("sizes", "owners", "shares"),
    [
        ((4, 1, 1), [0, 0, 1, 1], [(0, 2), (1, 2)]),
        ((2, 2, 1), [0, 0, 1, 1], [(0, 2), (1, 2)]),
        ((2, 1, 2), [0, 0, 1, 1], [(0, 2), (1, 2)]),
        ((1, 1, 4), [0, 0, 1, 1], [(0, 1), (0, 1)]),  # all rows are everybody's
        ((2, 1, 4), [0, 0, 1, 1, 2, 2, 3, 3], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((4, 1, 1), [0, 1, 0, 1], [(0, 1), (0, 1)]),  # rows that do not lie together
        ((8, 1, 1), [0, 0, 0, 1, 1, 1, 1, 1], [(0, 1), (0, 1)]),  # unequal shares
    ],
)
def test_a_process_feeds_the_rows_of_its_devices(
    sizes: tuple[int, int, int],
    owners: list[int],
    shares: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
):
    """Bug: F121: two processes feed the same rows, or one feeds another's."""
    devices = np.array([SimpleNamespace(process_index=owner) for owner in owners])
    mesh = SimpleNamespace(
        devices=devices.reshape(sizes),
        shape=dict(zip(("data", "fsdp", "model"), sizes, strict=True)),
    )
    for process, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        assert own_rows(cast(Any, mesh)) == share
