"""Checkpoints: whole or not there, readable on other devices, never mixed up."""

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from transformer_jax import checkpoint as module
from transformer_jax.checkpoint import Checkpoints, find_step, load_items, load_params, steps_of
from transformer_jax.config import Config, ConfigError, MeshConfig, ModelConfig, OptimizerConfig
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh, replicated
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import TrainState, abstract_state

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = ModelConfig(
    vocab_size=24, d_model=16, d_ff=32, num_heads=8, encoder_layers=1, decoder_layers=1
)
FINGERPRINT = "f" * 64


def open_checkpoints(run_dir: Path | str, **options: Any) -> Checkpoints:
    given = {"keep_latest": 9, "keep_best": 0, "best_metric": "loss", "fingerprint": FINGERPRINT}
    return Checkpoints(Path(run_dir), **(given | options))


def abstract(mesh: Mesh, optimizer: str = "adam", **model: Any) -> TrainState:
    config = Config(
        model=ModelConfig(**(vars(MODEL) | model)), optimizer=OptimizerConfig(name=optimizer)
    )
    return abstract_state(Model(config.model), make_optimizer(config), mesh)


def items(tree: TrainState) -> dict[str, Any]:
    return {"params": tree.params, "opt_state": tree.opt_state}


def fill(tree: Any, seed: int = 0) -> Any:
    """Random arrays of given shapes, types and shardings."""
    draw = np.random.default_rng(seed)

    def array(x: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.asarray(draw.normal(size=x.shape) * 100).astype(x.dtype)
        return jax.device_put(values, x.sharding)

    return jax.tree.map(array, tree)


def mesh(count: int = 1, **axes: int) -> Mesh:
    return make_mesh(MeshConfig(**(axes or {"data": count})), jax.devices()[:count])


def equal(got: Any, expected: Any) -> None:
    """Bit for bit, and of the same types and structure."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def refusal(call, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(autouse=True)
def nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Bug: F87: "Couldn't find sharding info", or another warning, in a run where all is well."""
    yield
    said = [record.getMessage() for record in caplog.get_records("call")]
    assert not [text for text in said if "sharding info" in text]


# ---- Other devices ------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[{"data": 2, "fsdp": 2, "model": 2}, {"data": 1, "fsdp": 8}],
    ids=["2,2,2", "1,8,1"],
)
def saved(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run directory written by eight devices, and what was written."""
    run_dir = tmp_path_factory.mktemp("run with ü")
    state = items(fill(abstract(mesh(8, **request.param))))
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
    checkpoints = open_checkpoints(run_dir)
    checkpoints.save(3, state, {"loss": 1.5})
    checkpoints.close()
    return run_dir, state


@pytest.mark.parametrize(
    "target",
    [mesh(1), mesh(2, fsdp=2, data=1), mesh(4, model=4, data=1), mesh(8, data=8)],
    ids=["1", "2", "4", "8"],
)
def test_any_mesh_restores_what_eight_devices_wrote(
    saved, target: Mesh, caplog: pytest.LogCaptureFixture
):
    """Bug: F86: a checkpoint can be read only on the devices that wrote it; F91: other types."""
    run_dir, state = saved
    wanted = items(abstract(target))
    got = open_checkpoints(run_dir).restore(3, wanted)
    equal(got, state)
    for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == want.sharding
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


READ = """
    import sys
    import jax, numpy as np
    from pathlib import Path
    from transformer_jax.checkpoint import load_params
    from transformer_jax.config import ConfigError, MeshConfig, ModelConfig
    from transformer_jax.model import Model
    from transformer_jax.sharding import make_mesh, replicated

    assert len(jax.devices()) == 1
    sharding = replicated(make_mesh(MeshConfig()))
    sizes = {"vocab_size": 24, "d_model": 16, "d_ff": 32, "num_heads": 8}
    shapes = Model(ModelConfig(**sizes, encoder_layers=1, decoder_layers=1))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes.abstract_params(),
    )
    try:
        params = load_params(Path(sys.argv[1]), 3, wanted, "f" * 64)
        np.savez(Path(sys.argv[1]) / "params.npz", *jax.tree.leaves(params))
    except ConfigError as error:
        print(error)
"""


def python(code: str, run_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process with one device."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(run_dir)],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_fresh_process_with_one_device_restores_it(saved):
    """Bug: F86: the laptop has no such device as the stored sharding names."""
    run_dir, state = saved
    result = python(READ, run_dir)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    with np.load(run_dir / "params.npz") as arrays:
        equal(list(arrays.values()), jax.tree.leaves(state["params"]))


def test_damaged_files_are_said_in_one_line(saved, tmp_path: Path):
    """Bug: a cut-off file gives zeros, or pages of TensorStore."""
    run_dir = tmp_path / "copy"
    shutil.copytree(saved[0], run_dir)
    for path in (run_dir / "checkpoints" / "3" / "params").rglob("d/*"):
        os.truncate(path, path.stat().st_size // 2)
    result = python(READ, run_dir)  # apart, as Orbax leaves coroutines that nobody waits for
    assert result.stdout.startswith(f"{run_dir / 'checkpoints' / '3'}: ")
    assert "read" in result.stdout and result.stdout.count("\n") == 1


def test_the_names_of_stored_devices_do_not_matter(tmp_path: Path):
    """Bug: F86: "device cuda:0 not found" on a machine without it."""
    state = {"params": fill(abstract(mesh(8, fsdp=8, data=1)).params)}
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state, None)
    checkpoints.close()
    (path,) = (tmp_path / "checkpoints/1/params").glob("_sharding")
    stored = path.read_text(encoding="utf-8")
    assert '\\"id\\": 7' in stored
    path.write_text(stored.replace('\\"id\\": 7', '\\"id\\": 7000'), encoding="utf-8")
    wanted = abstract(mesh(1)).params
    equal(load_params(tmp_path, 1, wanted, FINGERPRINT), state["params"])


# ---- Parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_parameters_are_read_without_the_optimizer(tmp_path: Path, optimizer: str):
    """Bug: F89: inference needs the optimizer's tree, or reads three times what it needs."""
    state = items(fill(abstract(mesh(1), optimizer)))
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state, None)
    checkpoints.close()
    opt_state = tmp_path / "checkpoints/1/opt_state"
    for path in opt_state.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    got = load_params(tmp_path, 1, abstract(mesh(1)).params, FINGERPRINT)
    equal(got, state["params"])


def test_a_restored_state_is_not_compiled_anew(saved):
    """Bug: F91: NamedTuples come back as dicts, lists or other types."""
    run_dir, _ = saved
    wanted = items(abstract(mesh(1)))

    @jax.jit
    def step(state: Any) -> Any:
        ready = state["opt_state"][0].count >= 0
        return jax.lax.cond(ready, lambda s: jax.tree.map(lambda x: x + 1, s), lambda s: s, state)

    step(fill(wanted))
    step(open_checkpoints(run_dir).restore(3, wanted))
    assert step._cache_size() == 1


def test_restored_arrays_can_be_donated(saved):
    """Bug: F113: a resumed run holds its first state twice, and only resumed runs lack memory."""
    run_dir, _ = saved
    restored = open_checkpoints(run_dir).restore(3, items(abstract(mesh(2, fsdp=2, data=1))))
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    jax.block_until_ready(step(restored))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored))


def test_a_tree_that_does_not_fit_is_listed_by_name(saved):
    """Bug: a wrong config ends in Orbax's own words, or restores what happens to fit."""
    run_dir, _ = saved
    wrong = abstract(mesh(1), d_ff=64, encoder_layers=2, ff_bias=False).params
    said = refusal(load_params, run_dir, 3, wrong, FINGERPRINT)
    for words in (
        str(run_dir / "checkpoints" / "3"),
        "missing encoder_1.self_attention.query",
        "unexpected encoder_0.feed_forward.inner_bias",
        "encoder_0.feed_forward.inner has shape (16, 32), the model (16, 64)",
    ):
        assert words in said
    assert "embedding has" not in said, "what fits is not listed"


def test_a_missing_item_is_named(tmp_path: Path):
    """Bug: resuming from weights alone starts Adam anew, silently."""
    checkpoints = open_checkpoints(tmp_path)
    wanted = abstract(mesh(1))
    checkpoints.save(1, {"params": fill(wanted.params)}, None)
    checkpoints.close()
    said = refusal(open_checkpoints(tmp_path).restore, 1, items(wanted))
    assert "got no readable item 'opt_state'" in said


def test_another_tokenizer_is_refused(saved):
    """Bug: F30: fluent nonsense, because pieces of the same number mean something else."""
    run_dir, _ = saved
    said = refusal(load_params, run_dir, 3, abstract(mesh(1)).params, "0" * 64)
    assert "f" * 12 in said and "0" * 12 in said


def test_a_newer_format_is_refused(saved, monkeypatch: pytest.MonkeyPatch):
    """Bug: an old program reads a new layout as if it knew it."""
    run_dir, _ = saved
    monkeypatch.setattr(module, "FORMAT_VERSION", 0)
    said = refusal(load_params, run_dir, 3, abstract(mesh(1)).params, FINGERPRINT)
    assert "got format 1, allowed: up to 0" in said


# ---- Whole or not there -------------------------------------------------------------------------


def small(value: float) -> dict[str, Any]:
    return {"params": {"w": jax.device_put(jnp.full((4,), value), replicated(mesh(1)))}}


def read_small(run_dir: Path, step: int) -> float:
    path = run_dir / "checkpoints" / str(step)
    wanted = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=replicated(mesh(1)))}
    return float(load_items(path, {"params": wanted}, FINGERPRINT)["params"]["w"][0])


def save_small(run_dir: Path, steps: dict[int, dict[str, float] | None], **options: Any) -> None:
    checkpoints = open_checkpoints(run_dir, **options)
    for step, metrics in steps.items():
        checkpoints.save(step, small(step), metrics)
    checkpoints.close()


def test_what_is_not_whole_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Bug: F95: a half-copied directory is the latest, and good ones are deleted for it."""
    save_small(tmp_path, {1: None, 2: None})
    root = tmp_path / "checkpoints"
    for junk in ("99", "98/params", "0007", "100.orbax-checkpoint-tmp", "notes"):
        (root / junk).mkdir(parents=True)
    (root / "97").write_text("a file")
    assert steps_of(tmp_path) == [1, 2]
    assert find_step(tmp_path, "latest", "loss") == 2
    assert "[1, 2]" in refusal(find_step, tmp_path, 99, "loss")
    assert "no whole checkpoint" in refusal(load_items, root / "98", {}, FINGERPRINT)

    checkpoints = open_checkpoints(tmp_path, keep_latest=2)
    assert checkpoints.latest_step == 2
    assert "99 is not a whole checkpoint" in caplog.text
    checkpoints.save(3, small(3), None)
    checkpoints.close()
    assert steps_of(tmp_path) == [2, 3], "the junk did not count as one of the two latest"
    assert [read_small(tmp_path, step) for step in (2, 3)] == [2, 3]


@pytest.mark.parametrize("name", ["", "missing", "empty"])
def test_no_checkpoint_is_said_in_one_line(tmp_path: Path, name: str):
    """Bug: a fresh or wrong directory ends in a traceback, or is created by reading."""
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert "got no checkpoint" in refusal(find_step, tmp_path / name, "best", "loss")
    assert not (tmp_path / "missing").exists()
    assert open_checkpoints(tmp_path / "new").latest_step is None


@pytest.mark.parametrize("relative", ["runs/a", "runs/a/", "./runs/a b", "runs/größe 爿", "~/run"])
def test_any_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str):
    """Bug: F93: "path should be absolute" after an hour; another run from another directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    checkpoints = open_checkpoints(relative)
    checkpoints.save(5, small(5), {"loss": 1.0})
    checkpoints.close()
    assert find_step(Path(relative), "best", "loss") == 5
    absolute = Path(relative).expanduser().absolute()
    assert absolute.is_relative_to(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_small(absolute, 5) == 5


def test_arrays_may_be_given_away_at_once(tmp_path: Path):
    """Bug: F111: the background save reads buffers that the next step has taken."""
    give = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = open_checkpoints(tmp_path)
    state = small(7)
    checkpoints.save(1, state, None)
    state = give(state)
    checkpoints.save(2, state, None)
    checkpoints.close()
    assert [read_small(tmp_path, step) for step in (1, 2)] == [7, -1]


def test_the_last_save_is_finished_by_close(tmp_path: Path):
    """Bug: F95: the process ends before the last checkpoint is written."""
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, items(fill(abstract(mesh(1)))), None)
    checkpoints.close()
    assert steps_of(tmp_path) == [1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1"]


def test_a_failed_save_is_not_silent(tmp_path: Path):
    """Bug: F94, F99: a full disk is swallowed in the background, or takes the last good one too."""
    code = """
        import resource, sys
        import jax, numpy as np
        from pathlib import Path
        from transformer_jax.checkpoint import Checkpoints

        checkpoints = Checkpoints(
            Path(sys.argv[1]), keep_latest=1, keep_best=0, best_metric="loss", fingerprint="f" * 64
        )
        values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
        for step in (1, 2):
            checkpoints.save(step, {"params": {"w": jax.device_put(values)}}, None)
            checkpoints._checkpointer.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # bytes a file may have
        checkpoints.close()
    """
    result = python(code, tmp_path)
    assert result.returncode == 1 and "File too large" in result.stderr
    assert steps_of(tmp_path) == [1]
    wanted = {"w": jax.ShapeDtypeStruct((100_000,), jnp.float32, sharding=replicated(mesh(1)))}
    got = load_params(tmp_path, 1, wanted, FINGERPRINT)["w"]
    expected = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_a_step_is_saved_again_with_its_metrics(tmp_path: Path):
    """Bug: the second save of a step is skipped, or its directory is left half-written."""
    save_small(tmp_path, {4: None})
    save_small(tmp_path, {4: {"loss": 2.0}})
    assert steps_of(tmp_path) == [4]
    metadata = json.loads((tmp_path / "checkpoints/4/_CHECKPOINT_METADATA").read_text())
    assert metadata["custom_metadata"]["metrics"] == {"loss": 2.0}


# ---- Best and latest ----------------------------------------------------------------------------

METRICS = {
    1: {"loss": 3.0, "bleu": 10.0},
    2: {"loss": 1.0, "bleu": 20.0},
    3: None,
    4: {"loss": 2.0, "bleu": 30.0},
    5: None,
    6: {"loss": 2.5, "bleu": 5.0},
    7: None,
}


@pytest.mark.parametrize(("metric", "best"), [("loss", 2), ("bleu", 4)])
def test_best_and_latest_are_found_and_kept(tmp_path: Path, metric: str, best: int):
    """Bug: the highest loss is the best; the best is deleted for newer ones; a checkpoint without
    metrics counts as good or bad."""
    save_small(tmp_path, METRICS, keep_latest=2, keep_best=1, best_metric=metric)
    assert steps_of(tmp_path) == [best, 6, 7]
    assert find_step(tmp_path, "best", metric) == best
    assert find_step(tmp_path, "latest", metric) == 7
    assert find_step(tmp_path, "6", metric) == find_step(tmp_path, 6, metric) == 6
    assert read_small(tmp_path, best) == best


def test_without_metrics_the_best_is_the_latest(tmp_path: Path):
    """Bug: a run without validation cannot be translated with."""
    save_small(tmp_path, {1: None, 10: None, 9: None})
    assert steps_of(tmp_path) == [1, 9, 10], "steps are numbers, not words"
    assert find_step(tmp_path, "best", "bleu") == 10


@pytest.mark.parametrize("which", ["worst", "-1", "", "2.0", "²"])
def test_an_unknown_step_is_refused(tmp_path: Path, which: str):
    """Bug: a misspelt --which gives the latest, or a traceback."""
    save_small(tmp_path, {2: None})
    assert "allowed: best, latest, average or one of [2]" in refusal(
        find_step, tmp_path, which, "loss"
    )
