"""Parameters out and in again: the flat file, and Marian's with its axis D in another order."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax import Translator
from transformer_jax.__main__ import main
from transformer_jax.config import Config, ConfigError
from transformer_jax.decode.trained import load_trained
from transformer_jax.interop.ctranslate2 import export_ctranslate2
from transformer_jax.interop.marian import export_marian, import_marian
from transformer_jax.interop.tensors import read_safetensors, write_safetensors
from transformer_jax.interop.weights import flatten, unflatten, write_run
from transformer_jax.model import Model

TEXTS = ["the cat saw a dog", "Write to stop, fill 123", "größe", ""]

pytestmark = pytest.mark.usefixtures("quick_compilation")


def same_run(one: Path, other: Path) -> None:
    first, second = load_trained(one), load_trained(other)
    assert first.config.model == second.config.model
    assert first.tokenizer.fingerprint == second.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


def test_the_flat_file_both_ways(run: Path, tmp_path: Path):
    """Bug: a name that is split at the wrong place, an array saved in another order of memory."""
    export = ["export-safetensors", "--checkpoint", str(run), "--output", str(tmp_path / "flat")]
    assert main(export) == 0
    arguments = ["--source", str(tmp_path / "flat"), "--output", str(tmp_path / "back")]
    assert main(["import-safetensors", *arguments]) == 0
    same_run(run, tmp_path / "back")
    assert (tmp_path / "flat" / "config.json").read_text() == (run / "config.json").read_text()


def test_the_flat_file_is_what_the_format_says(tmp_path: Path):
    """Bug: bytes that only our own reader understands. Read here by hand."""
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "a.c": np.float32([7])}
    write_safetensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = header["b"]["data_offsets"]
    values = np.frombuffer(content[8 + length :][begin:end], "<f4")
    assert header["b"]["shape"] == [3, 2] and values.tolist() == [0, 3, 1, 4, 2, 5]
    assert (8 + length) % 8 == 0 and header["__metadata__"] == {"format": "pt"}


def test_wrong_names_and_shapes_in_the_flat_file(run: Path, tmp_path: Path):
    """Bug: a model that starts with some parameters of another one."""
    main(["export-safetensors", "--checkpoint", str(run), "--output", str(tmp_path / "flat")])
    path = tmp_path / "flat" / "model.safetensors"
    tensors = read_safetensors(path)
    tensors["extra"] = tensors.pop("encoder_0.feed_forward.inner")
    tensors["embedding"] = tensors["embedding"][:-1]
    write_safetensors(path, tensors)
    with pytest.raises(ConfigError) as caught:
        main(["import-safetensors", "--source", str(path.parent), "--output", str(tmp_path / "r")])
    assert "missing encoder_0.feed_forward.inner; cannot be mapped: extra" in str(caught.value)
    assert "embedding has shape (309, 32), the model (310, 32)" in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_names_are_taken_apart_and_put_together():
    """Bug: two parameters of one name."""
    tree = {"a": {"b": np.ones(2), "c": {"d": np.zeros(1)}}, "e": np.ones(1)}
    flat = flatten(tree)
    assert list(flat) == ["a.b", "a.c.d", "e"]
    jax.tree.map(np.testing.assert_array_equal, unflatten(flat), tree)


@pytest.mark.parametrize("order", ["interleaved", "concatenated"])
def test_marian_and_back_is_bit_equal(order: str, run: Path, tmp_path: Path):
    """Bug: the permutation is not undone, or biases that were added for the format stay."""
    config = load_trained(run).config
    model = dataclasses.replace(config.model, sinusoid_order=order)
    trained = load_trained(run)._replace(config=dataclasses.replace(config, model=model))
    write_run(tmp_path / "run", trained.params, trained.config, trained.tokenizer)
    export_marian(trained, tmp_path / "marian")
    import_marian(tmp_path / "marian", tmp_path / "back")
    same_run(tmp_path / "run", tmp_path / "back")


def test_a_marian_of_elsewhere_translates_as_ours(
    marian_directory: Path, run: Path, tmp_path: Path
):
    """Bug: without our own note in config.json the permuted model is another function."""
    config = json.loads((marian_directory / "config.json").read_text())
    note = config.pop("transformer_jax")
    assert note["sinusoid_order"] == "interleaved" and note["attention_bias"] is False
    for file in marian_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    import_marian(tmp_path, tmp_path / "run")
    theirs, ours = Translator.from_checkpoint(tmp_path / "run"), Translator.from_checkpoint(run)
    assert theirs.config.model.sinusoid_order == "concatenated"
    assert theirs.config.model.attention_bias and theirs.config.model.norm_epsilon == 1e-5
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(4, 310, (3, 9)), rng.integers(4, 310, (3, 7))
    got = theirs.model.apply(theirs.params, src, tgt)
    np.testing.assert_allclose(got, ours.model.apply(ours.params, src, tgt), atol=1e-4, rtol=1e-4)
    options = {"beam_size": 2, "length_penalty": 0.0, "rule": "exact", "max_extra_tokens": 3}
    assert theirs.translate(TEXTS, **options) == ours.translate(TEXTS, **options)


MISFITS = {
    "norm_position": "pre",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "num_kv_heads": 2,
    "attention_window": 4,
    "sinusoid_exponent": "i/(d/2-1)",
    "d_k": 16,
}


@pytest.mark.parametrize("field", MISFITS)
def test_what_marian_cannot_hold_is_refused(field: str, run: Path, tmp_path: Path):
    """Bug: an export that loads there and translates into noise."""
    trained = load_trained(run)
    model = dataclasses.replace(trained.config.model, **{field: MISFITS[field]})
    trained = trained._replace(config=Config(model=model))
    with pytest.raises(ConfigError, match=f"--model.{field.replace('_', '-')}: got"):
        export_marian(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("field", ["positions", "num_kv_heads", "attention_window", "d_k"])
def test_what_ctranslate2_cannot_hold_is_refused(field: str, run: Path, tmp_path: Path):
    """Bug: as above; and that the library is missing is said before what it could not have done."""
    trained = load_trained(run)
    model = dataclasses.replace(trained.config.model, **{field: MISFITS[field]})
    trained = trained._replace(config=Config(model=model))
    with pytest.raises(ConfigError, match=f"--model.{field.replace('_', '-')}: got"):
        export_ctranslate2(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctranslate2_missing_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: a traceback of ModuleNotFoundError."""
    monkeypatch.setitem(__import__("sys").modules, "ctranslate2", None)
    arguments = ["--checkpoint", str(run), "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="pip install ctranslate2"):
        main(["export-ctranslate2", *arguments])
    assert not (tmp_path / "out").exists()


def test_every_parameter_names_its_axis_d(tiny_config):
    """Bug: the permutation misses a parameter whose axis D has another name."""
    config = dataclasses.replace(
        tiny_config, d_model=20, d_ff=36, d_k=6, d_v=7, attention_bias=True
    )
    model = Model(config)
    shapes, axes = model.abstract_params(), model.logical_axes()
    for shape, names in zip(
        jax.tree.leaves(shapes),
        jax.tree.leaves(axes, is_leaf=lambda x: hasattr(x, "index")),
        strict=True,
    ):
        assert [n == 20 for n in shape.shape] == [name == "embed" for name in names]
