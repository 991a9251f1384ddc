"""What is installed beside the project, and what its source leans on."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
FILES = sorted(REPOSITORY.glob("requirements*.txt"))
SOURCE = [REPOSITORY / "train.py", *(REPOSITORY / "transformer_jax").rglob("*.py")]


def lines(path: Path) -> list[str]:
    rows = (line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines())
    return [row for row in rows if row and not row.startswith("-r")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_requirement_has_tested_bounds(path: Path):
    """Bug: F135: a new release of one of jax, flax, optax or orbax breaks the others."""
    for line in lines(path):
        assert "==" in line or re.search(r">=[\d.]+,<[\d.]+$", line), line


def test_packages_are_those_that_exist_and_serve():
    """Bugs: F137: orbax without -checkpoint is another package; F141, F142: TensorFlow comes
    along; libtpu on a machine without a TPU."""
    names = {re.split(r"[<>=\[ ]", line)[0] for line in lines(REPOSITORY / "requirements.txt")}
    assert {"jax", "flax", "optax", "orbax-checkpoint", "sentencepiece"} <= names
    for path in FILES:
        got = {re.split(r"[<>=\[ ]", line)[0].lower() for line in lines(path)}
        assert not got & {"orbax", "tensorflow", "tensorflow-text", "libtpu", "pickle5"}


@pytest.mark.parametrize("path", SOURCE, ids=lambda path: path.name)
def test_nothing_that_has_gone_or_clashes_is_used(path: Path):
    """Bugs: F134: aliases that jax has removed; F138: protobuf classes that two packages register;
    code that runs when a file is read."""
    text = path.read_text("utf-8")
    for word in ("jax.tree_map", "tree_multimap", "jax.pmap", "sentencepiece_model_pb2"):
        assert word not in text
    assert not re.search(r"^\s*(import pickle|from pickle)|allow_pickle=True", text, re.MULTILINE)
