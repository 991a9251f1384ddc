"""The data command: the pipeline's own view of a corpus."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = "zero one two three four five six seven eight nine".split()


@pytest.fixture()
def files(tmp_path: Path) -> list[str]:
    pairs = [(" ".join(WORDS[int(d)] for d in str(i * i)), str(i * i)) for i in range(80)]
    pairs += [("", "7"), ("same", "same"), pairs[3], (" ".join(WORDS * 9), "0")]
    names = [str(tmp_path / name) for name in ("a.en", "a.de")]
    for side, name in enumerate(names):
        Path(name).write_text("".join(f"{p[side]}\n" for p in pairs), encoding="utf-8")
    return names


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "transformer_jax",
            "data",
            "--config",
            "configs/text.py",
            *arguments,
        ],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "none such"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_counts_lengths_and_first_pairs(files: list[str], tmp_path: Path):
    """Bug: the view is not what training sees; it needs a device; a filter is not counted."""
    options = {
        "data.train-source": files[0],
        "data.train-target": files[1],
        "data.max-source-tokens": "40",
        "data.global-batch-tokens": "128",
        "data.cache-dir": str(tmp_path / "cache"),
        "tokenizer.vocab-size": "300",
        "tokenizer.kind": "bpe",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags += ["--data.drop-identical", "True", "--data.drop-duplicates", "True"]
    result = run("--show", "2", *flags)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split("\n")
    assert f"source: {files[0]}: 84 pairs, 80 in an epoch" in lines
    assert any(
        line.startswith("kept 80 of 84 training pairs (1 empty, 1 too long, ") for line in lines
    )
    for reason, count in (("empty", 1), ("too long", 1), ("identical", 1), ("duplicates", 1)):
        assert f"dropped: {count} {reason}" in lines
    assert "fill " in result.stdout and "shapes " in result.stdout
    bins = [line.split() for line in lines if " to " in line and line.split()[0].isdigit()]
    counted = [[int(cell) for cell in row[3:] if cell.isdigit()] for row in bins]
    assert [sum(side) for side in zip(*counted, strict=True)] == [80, 80]
    assert "1 source: zero" in lines and "2 target: 1" in lines
    assert not any(line.startswith("3 ") for line in lines)
    pieces = next(line for line in lines if line.startswith("2 pieces: "))
    assert pieces.endswith("</s>")
    ids = next(line for line in lines if line.startswith("2 ids: ")).split()[2:]
    assert ids[-1] == "1" and len(ids) == len(pieces.split()) - 2


def test_mistakes_are_one_line(files: list[str]):
    """Bug: a traceback for the same mistakes that training refuses in one line."""
    result = run("--data.train-source", files[0], "--data.train-target", "nowhere")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: nowhere: cannot be read: No such file or directory\n"
