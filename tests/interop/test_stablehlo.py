"""Programs that run without this project."""

import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax import Translator
from transformer_jax.__main__ import main

LINES = ["the cat saw a dog", "Write to stop, fill 123", "größe", "the the the one bird sang"]
# Runs translate.py where the project cannot be imported.
BLOCKED = """
import runpy, sys
sys.modules["transformer_jax"] = sys.modules["flax"] = None
sys.path[:] = [p for p in sys.path if p not in ("", ".")]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_the_export_runs_where_the_project_is_not(run: Path, tmp_path: Path):
    """Bug: a program of one length only, a cache or mask off by one, a pytree class of ours."""
    output = tmp_path / "programs"
    assert main(["export-stablehlo", "--checkpoint", str(run), "--output", str(output)]) == 0
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(output / "translate.py")],
        input="\n".join(LINES) + "\n",
        cwd=tmp_path,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ours = Translator.from_checkpoint(run).translate(LINES, beam_size=1)
    assert result.stdout.split("\n")[:-1] == ours
    assert len(set(ours)) > 1


def test_a_batch_of_hypotheses_equals_the_model(run: Path, tmp_path: Path):
    """Bug: rows of a batch, or steps of the cache, that see each other."""
    import jax
    import numpy as np

    output = tmp_path / "programs"
    main(["export-stablehlo", "--checkpoint", str(run), "--output", str(output)])
    translator = Translator.from_checkpoint(run)
    call = lambda name: jax.jit(jax.export.deserialize((output / name).read_bytes()).call)
    encode, step = call("encode.stablehlo"), call("decode_step.stablehlo")
    weights = dict(np.load(output / "weights.npz"))
    rng = np.random.default_rng(0)
    src, tgt = (rng.integers(4, 310, (3, n)).astype(np.int32) for n in (7, 5))
    mask = np.arange(7) < np.asarray([7, 3, 5])[:, None]
    want = translator.model.apply(translator.params, src, tgt, mask.astype(np.int32))
    source = encode(weights, src, mask)
    past = [(np.zeros((3, 4, 8, 6), np.float32), np.zeros((3, 4, 6, 8), np.float32))] * 2
    for time in range(5):
        logits, past = step(weights, tgt[:, time], np.int32(time), past, source)
        np.testing.assert_allclose(logits, want[:, time], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("command", ["export-stablehlo", "export-marian"])
def test_a_run_that_is_not_there(command: str, tmp_path: Path):
    """Bug: a traceback, or an empty directory that looks like an export."""
    from transformer_jax.config import ConfigError

    with pytest.raises(ConfigError, match="no such file, so this is not a run directory"):
        main([command, "--checkpoint", str(tmp_path / "none"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
