"""Files from elsewhere that are damaged or mean harm: one clear error each, nothing written."""

import io
import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_jax.__main__ import main
from transformer_jax.config import ConfigError
from transformer_jax.interop.tensors import read_safetensors, read_tensors, write_safetensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and leave the bytes."""
    header, data = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def with_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def truncate(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[: len(content) // 2])


def truncate_in_header(directory: Path) -> None:
    (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:100])


def header_of_10_tb(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", 10 * 2**40) + content[8:])


def tensor_of_10_tb(directory: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        header["final_logits_bias"] |= {
            "shape": [1, 10 * 2**38],
            "data_offsets": [0, 10 * 2**40],
        }

    with_header(directory / WEIGHTS, change)


def overflowing_shape(directory: Path) -> None:
    change = lambda header: header["final_logits_bias"].update(shape=[2**32, 2**32])
    with_header(directory / WEIGHTS, change)


def negative_offset(directory: Path) -> None:
    change = lambda header: header["final_logits_bias"].update(data_offsets=[-1240, 0])
    with_header(directory / WEIGHTS, change)


def overlapping(directory: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name.endswith("fc1.bias")]
        header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]

    with_header(directory / WEIGHTS, change)


def integer_weights(directory: Path) -> None:
    with_header(directory / WEIGHTS, lambda header: header["final_logits_bias"].update(dtype="I32"))


def not_finite(directory: Path) -> None:
    tensors = read_safetensors(directory / WEIGHTS)
    tensors["model.encoder.layers.1.fc1.bias"][3] = np.nan
    write_safetensors(directory / WEIGHTS, tensors)


def header_not_json(directory: Path) -> None:
    _, data = header_of(directory / WEIGHTS)
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", 8) + b"{'a': 1}" + data)


def name_twice(directory: Path) -> None:
    header, data = header_of(directory / WEIGHTS)
    text = json.dumps(header)
    text = text[:-1] + ', "model.shared.weight": ' + json.dumps(header["model.shared.weight"]) + "}"
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)


def unknown_name(directory: Path) -> None:
    tensors = read_safetensors(directory / WEIGHTS)
    tensors["model.encoder.layers.7.adapter.weight"] = np.zeros((2, 2), np.float32)
    write_safetensors(directory / WEIGHTS, tensors)


def missing_name(directory: Path) -> None:
    tensors = read_safetensors(directory / WEIGHTS)
    del tensors["model.decoder.layers.1.encoder_attn.k_proj.weight"]
    write_safetensors(directory / WEIGHTS, tensors)


def other_shape(directory: Path) -> None:
    with_json(directory / "config.json", encoder_ffn_dim=48, decoder_ffn_dim=48)


def learned_positions(directory: Path) -> None:
    tensors = read_safetensors(directory / WEIGHTS)
    table = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    tensors["model.encoder.embed_positions.weight"] = table
    write_safetensors(directory / WEIGHTS, tensors)


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def index_to(name: str) -> Callable[[Path], None]:
    """A sharded model whose index names this file."""

    def damage(directory: Path) -> None:
        names = read_safetensors(directory / WEIGHTS)
        shutil.copy(directory / WEIGHTS, directory.parent / "outside.safetensors")
        (directory / WEIGHTS).rename(directory / "shard.safetensors")
        index = {"weight_map": dict.fromkeys(names, name.format(parent=directory.parent))}
        (directory / INDEX).write_text(json.dumps(index))

    return damage


def duplicate_ids(directory: Path) -> None:
    vocabulary = json.loads((directory / "vocab.json").read_text())
    with_json(directory / "vocab.json", **{list(vocabulary)[9]: 8})


def id_beyond(directory: Path) -> None:
    with_json(directory / "vocab.json", more=310)


def id_not_a_number(directory: Path) -> None:
    with_json(directory / "vocab.json", more="310")


def not_sentencepiece(directory: Path) -> None:
    (directory / "target.spm").write_bytes(b"\x00\xffnothing")


class Malice:
    """What a pickle can do when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def only_a_pickle(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Malice(directory / "trace")}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, r"truncated"),
    "truncated header": (truncate_in_header, r"header claims \d+ bytes, the file has 100"),
    "header of 10 TB": (header_of_10_tb, r"header claims 10995116277760 bytes"),
    "tensor of 10 TB": (tensor_of_10_tb, r"final_logits_bias: ends at byte 10995116277760"),
    "shape that overflows": (overflowing_shape, r"final_logits_bias: its header contradicts"),
    "negative offset": (negative_offset, r"final_logits_bias: its header contradicts"),
    "overlapping tensors": (overlapping, r"begins at byte"),
    "integers": (integer_weights, r"final_logits_bias: got dtype I32, allowed.*F32"),
    "not finite": (not_finite, r"model\.encoder\.layers\.1\.fc1\.bias: .*not finite"),
    "header is not JSON": (header_not_json, r"header: not JSON"),
    "a name twice": (name_twice, r"'model.shared.weight' twice"),
    "a name too many": (unknown_name, r"cannot be mapped: model.encoder.layers.7.adapter.weight"),
    "a name too few": (missing_name, r"missing model.decoder.layers.1.encoder_attn.k_proj.weight"),
    "another shape": (other_shape, r"fc1.weight has shape \(64, 32\), the model \(48, 32\)"),
    "learned positions": (learned_positions, r"learned positions"),
    "no config": (remove("config.json"), r"config\.json: no such file"),
    "no weights": (remove(WEIGHTS), r"got no weights, allowed: model.safetensors"),
    "no source.spm": (remove("source.spm"), r"source\.spm: no such file"),
    "no vocab": (remove("vocab.json"), r"vocab\.json: no such file"),
    "missing shard": (index_to("other.safetensors"), r"other\.safetensors"),
    "path upwards": (index_to("../outside.safetensors"), r"'\.\./outside.safetensors', allowed"),
    "absolute path": (index_to("{parent}/outside.safetensors"), r"outside.safetensors', allowed"),
    "path of Windows": (index_to("..\\outside.safetensors"), r"outside.safetensors', allowed"),
    "shard of another kind": (index_to("config.json"), r"'config.json', allowed"),
    "duplicate ids": (duplicate_ids, r"vocab.json: id 8: got '.+' and '.+'"),
    "id beyond the table": (id_beyond, r"vocab.json: 'more': got 310, allowed: an id below 310"),
    "id that is text": (id_not_a_number, r"vocab.json: 'more': got '310'"),
    "no SentencePiece": (not_sentencepiece, r"target\.spm: .*not a SentencePiece model"),
}
SETTINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another model": ("config.json", {"model_type": "bart"}, r"model_type: got 'bart'"),
    "no number": ("config.json", {"d_model": "32"}, r"d_model: got '32', allowed: a whole number"),
    "pre-norm": ("config.json", {"normalize_before": True}, r"normalize_before: got True"),
    "heads": ("config.json", {"decoder_attention_heads": 2}, r"decoder_attention_heads: got 2"),
    "activation": (
        "config.json",
        {"activation_function": "mish"},
        r"activation_function: .*'mish'",
    ),
    "pad": (
        "generation_config.json",
        {"pad_token_id": 310},
        r"pad_token_id: got 310, .* below 310",
    ),
    "words": (
        "generation_config.json",
        {"bad_words_ids": [[3, 4]]},
        r"bad_words_ids: got \[3, 4\]",
    ),
    "stopping": ("generation_config.json", {"early_stopping": "soon"}, r"early_stopping: .*'soon'"),
}


def refused(directory: Path, output: Path, message: str, command: str = "import-marian") -> None:
    """One ConfigError of one line, and no trace of an output."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(ConfigError, match=message) as caught:
        main([command, "--source", str(directory), "--output", str(output)])
    assert "\n" not in str(caught.value)
    assert sorted(output.parent.iterdir()) == before


@pytest.fixture()
def copy(marian_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(marian_directory, tmp_path / "copy"))


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_and_nothing_written(name: str, copy: Path, tmp_path: Path):
    """Bug: memory for what a header claims, a file read outside the directory, a traceback, a run
    of which half is there."""
    damage, message = DAMAGE[name]
    damage(copy)
    refused(copy, tmp_path / "run", message)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_carried_over(name: str, copy: Path, tmp_path: Path):
    """Bug: a setting that is dropped without a word, and another model than the one given."""
    file, changes, message = SETTINGS[name]
    with_json(copy / file, **changes)
    refused(copy, tmp_path / "run", message)


def test_a_pickle_is_not_run(copy: Path, tmp_path: Path):
    """Bug: pickle.load, or torch.load without weights_only: the file runs a program."""
    only_a_pickle(copy)
    refused(copy, tmp_path / "run", "weights alone|pip install torch")
    assert not (copy / "trace").exists()


def test_without_torch_a_pickle_says_what_to_install(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: ModuleNotFoundError, or torch as a requirement of everybody."""
    monkeypatch.setitem(sys.modules, "torch", None)
    only_a_pickle(copy)
    refused(copy, tmp_path / "run", "torch is needed for this: pip install torch")


def test_an_output_that_is_there_is_not_touched(marian_directory: Path, tmp_path: Path):
    """Bug: an import over a run that somebody has trained for a week."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("mine")
    refused(marian_directory, tmp_path / "run", "allowed: a new or an empty directory")
    assert (tmp_path / "run" / "config.json").read_text() == "mine"


def test_a_write_that_fails_leaves_nothing(
    marian_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Bug: a disk that is full in the last file, and a run directory that looks whole."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer_jax.interop.weights.Checkpoints.save", full)
    (tmp_path / "deep").mkdir()
    output = tmp_path / "deep" / "er" / "run"
    with pytest.raises(ConfigError, match="No space left"):
        main(["import-marian", "--source", str(marian_directory), "--output", str(output)])
    assert list((tmp_path / "deep").iterdir()) == []


def test_shards_and_half_precision(copy: Path, tmp_path: Path):
    """Bug: only the first shard is read; bfloat16 read as float16, or its bytes swapped."""
    import ml_dtypes

    tensors = read_safetensors(copy / WEIGHTS)
    (copy / WEIGHTS).unlink()
    names, weight_map = sorted(tensors), {}
    for number, kind in enumerate((np.float16, ml_dtypes.bfloat16)):
        some, data, header = names[number::2], io.BytesIO(), {}
        for name in some:
            begin = data.tell()
            data.write(tensors[name].astype(kind).tobytes())
            tag = "F16" if kind is np.float16 else "BF16"
            shape, bounds = list(tensors[name].shape), [begin, data.tell()]
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": bounds}
        text = json.dumps(header).encode()
        file = f"model-0000{number}.safetensors"
        (copy / file).write_bytes(struct.pack("<Q", len(text)) + text + data.getvalue())
        weight_map |= dict.fromkeys(some, file)
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    found = read_tensors(copy)
    assert sorted(found) == names
    for number, (kind, error) in enumerate(((np.float16, 1e-3), (ml_dtypes.bfloat16, 8e-3))):
        for name in names[number::2]:
            np.testing.assert_array_equal(found[name], tensors[name].astype(kind))
            np.testing.assert_allclose(found[name], tensors[name], rtol=error, atol=1e-6)
