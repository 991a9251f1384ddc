"""Programs that run without this project."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Literal

import jax
import pytest

from transformer_jax import Translator
from transformer_jax.__main__ import main
from transformer_jax.config import Config, DataConfig, DecodeConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.interop.weights import write_run
from transformer_jax.model import Model

LINES = ["the cat saw a dog", "Write to stop, fill 123", "größe", "the the the one bird sang"]
# Runs translate.py where the project cannot be imported.
BLOCKED = """
import runpy, sys
sys.modules["transformer_jax"] = sys.modules["flax"] = None
sys.path[:] = [p for p in sys.path if p not in ("", ".")]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_alone(programs: Path, lines: list[str]) -> list[str]:
    """What translate.py of an export writes, in a process without the project."""
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(programs / "translate.py")],
        input="\n".join(lines) + "\n",
        cwd=programs,
        env={"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]


def test_the_export_runs_where_the_project_is_not(run: Path, tmp_path: Path):
    """Bug: a program of one length only, a cache or mask off by one, a pytree class of ours."""
    output = tmp_path / "programs"
    assert main(["export-stablehlo", "--checkpoint", str(run), "--output", str(output)]) == 0
    ours = Translator.from_checkpoint(run).translate(LINES, beam_size=1)
    assert run_alone(output, LINES) == ours
    assert len(set(ours)) > 1


@pytest.mark.parametrize("place", ["source", "both"])
def test_the_export_speaks_the_language_of_the_run(
    place: Literal["source", "both"], tiny_config: ModelConfig, lines: list[str], tmp_path: Path
):
    """Bug: tags of a multilingual model are left out, so that it writes whatever language."""
    pairs = [(line, line) for line in lines]
    learned = Tokenizer.train(pairs, TokenizerConfig(vocab_size=300), ["en", "de", "fr"])
    tokenizer = Tokenizer(learned.source, None, learned.tags, place)
    model = dataclasses.replace(tiny_config, vocab_size=tokenizer.vocab_size)
    params = jax.jit(Model(model).init)(jax.random.key(1))
    data = DataConfig(source_lang="en", target_lang="de", max_source_tokens=48)
    config = Config(model=model, data=data, decode=DecodeConfig(max_extra_tokens=4))
    write_run(tmp_path / "run", params, config, tokenizer)
    translator = Translator.from_checkpoint(tmp_path / "run")
    ours = translator.translate(LINES, beam_size=1)
    french = translator.translate(LINES, beam_size=1, target_lang="fr")
    assert ours != french
    program = str(tmp_path / "programs")
    assert (
        main(["export-stablehlo", "--checkpoint", str(tmp_path / "run"), "--output", program]) == 0
    )
    asks = [">>fr<<" * (place == "source") + line for line in LINES]
    found = run_alone(Path(program), LINES + asks)
    assert found == ours + (french if place == "source" else ours)


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
