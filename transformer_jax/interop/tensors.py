"""Named arrays in files: safetensors, whole or in shards, and torch's files without unpickling.

A safetensors file is the length of its header as a little-endian uint64, the header as JSON (for
each name the dtype, the shape, the first and the last byte), then the bytes. Everything that the
header says is checked against the size of the file before an array is made of it.
"""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from transformer_jax.config import ConfigError
from transformer_jax.interop.directory import parse_json, read_json

# Of weights; whole numbers, bytes and float8 are something else.
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}  # others: 1
_LONGEST_HEADER = 100_000_000  # the format's own limit


def optional_library(name: str, install: str) -> Any:
    """A library that only some commands need.

    Raises:
        ConfigError: it is not installed; says how to.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} is needed for this: pip install {install} ({error})") from None


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """All weights of a model directory, as float32.

    Read is, of what is there, the first of model.safetensors, its shards, pytorch_model.bin and
    its shards.

    Raises:
        ConfigError: none of them, or something in them that weights do not have.
    """
    for whole, read in (
        ("model.safetensors", read_safetensors),
        ("pytorch_model.bin", _read_torch),
    ):
        if (directory / whole).exists():
            return read(directory / whole)
        index = directory / f"{whole}.index.json"
        if index.exists():
            return {k: v for part in _shards(index, whole) for k, v in read(part).items()}
    raise ConfigError(
        f"{directory}: got no weights, allowed: model.safetensors or pytorch_model.bin, "
        "whole or in shards with their index"
    )


def _shards(index: Path, whole: str) -> list[Path]:
    """The files that an index names, all beside it."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index}: weight_map: got {names!r}, allowed: names of tensors to files")
    suffix = Path(whole).suffix
    for tensor, name in names.items():
        plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
        if not plain or any(c in name for c in "/\\:") or not name.endswith(suffix):
            raise ConfigError(
                f"{index}: weight_map: {tensor}: got {name!r}, allowed: a {suffix} file beside it"
            )
    return [index.parent / name for name in sorted(set(names.values()))]


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file, as float32.

    Raises:
        ConfigError: damaged, or an array that is no weight.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(f"{path}: {message}")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            require(size >= 8, f"got {size} bytes, allowed: a safetensors file")
            require(
                length <= min(size - 8, _LONGEST_HEADER),
                f"its header claims {length} bytes, the file has {size}: truncated or damaged",
            )
            header = parse_json(file.read(length), f"{path}: header")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    begin = 8 + length
    places = []
    for name, entry in header.items():
        dtype, shape, bounds = _entry(path, name, entry)
        require(
            bounds[1] <= size - begin,
            f"{name}: ends at byte {bounds[1]} of {size - begin}: the file is truncated",
        )
        require(
            dtype in _DTYPES,
            f"{name}: got dtype {dtype}, allowed for weights: {', '.join(_DTYPES)}",
        )
        places.append((bounds, name, dtype, shape))
    places.sort()
    end = 0
    for bounds, name, *_ in places:
        require(
            bounds[0] == end, f"{name}: begins at byte {bounds[0]}, the one before ends at {end}"
        )
        end = bounds[1]
    require(end == size - begin, f"{size - begin - end} bytes belong to no tensor")
    data = np.memmap(path, np.uint8, "r", begin, (end,)) if end else np.zeros(0, np.uint8)
    found = {}
    for bounds, name, dtype, shape in places:
        values = data[slice(*bounds)].view(_DTYPES[dtype]).reshape(shape)
        found[name] = np.array(values, np.float32)
        require(bool(np.isfinite(found[name]).all()), f"{name}: got numbers that are not finite")
    return found


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """What the header says of one tensor, if it agrees with itself."""
    try:
        dtype, shape, bounds = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in [*shape, *bounds])
        width = np.dtype(_DTYPES[dtype]).itemsize if dtype in _DTYPES else _WIDTHS.get(dtype, 1)
        first, last = bounds
        if whole and last - first == math.prod(shape) * width:
            return dtype, tuple(shape), (first, last)
    except (KeyError, TypeError, ValueError):
        pass
    raise ConfigError(f"{path}: {name}: its header contradicts itself: {str(entry)[:200]}")


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32 arrays, in the order of their names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this word
    end = 0
    for name in sorted(tensors):
        begin, end = end, end + tensors[name].size * 4
        shape = list(tensors[name].shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name], "<f4").data)


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    """A state dict, by torch's loader of weights alone: what else a pickle can do is refused."""
    torch = optional_library("torch", "torch")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch meets in damaged or hostile files
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{path}: cannot be read as weights alone: {first}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: got {type(state).__name__}, allowed: tensors by name")
    found = {}
    for name, tensor in state.items():
        allowed = (torch.float32, torch.float16, torch.bfloat16)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in allowed:
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise ConfigError(f"{path}: {name}: got {got}, allowed: float32, float16, bfloat16")
        found[str(name)] = tensor.float().numpy()
        if not np.isfinite(found[str(name)]).all():
            raise ConfigError(f"{path}: {name}: got numbers that are not finite")
    return found
