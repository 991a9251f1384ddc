"""Scores beside BLEU: those of the sacrebleu command, or counted by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.config import ConfigError
from transformer_jax.scores import by_length, compound_split_bleu, confidence, paired

REFERENCES = [f"die Katze sitzt auf der Matte Nummer {i} und schläft" for i in range(40)]
GOOD = [line.replace("schläft", "ruht") if i % 3 else line for i, line in enumerate(REFERENCES)]
BAD = [line.replace("sitzt auf", "steht an") for line in GOOD]


def sacrebleu(directory: Path, *options: str, **files: list[str]) -> dict | list:
    for name, lines in files.items():
        (directory / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    arguments = ["ref", "-i", *(name for name in files if name != "ref")]
    result = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *arguments, *options, "--format", "json", "-w", "6"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout)


def test_the_interval_is_that_of_the_command(tmp_path: Path):
    """Bug: half or double the width, of another confidence, or of resampled words."""
    said = sacrebleu(tmp_path, "-m", "bleu", "--confidence", ref=REFERENCES, hyp=BAD)
    found = confidence(BAD, REFERENCES, "de")
    assert isinstance(said, dict)
    assert found["mean"] == pytest.approx(said["confidence_mean"], abs=1e-4)
    assert found["ci"] == pytest.approx(said["confidence_var"], abs=1e-4)


def test_the_paired_test_is_that_of_the_command(tmp_path: Path):
    """Bug: system and baseline are exchanged, or samples are not paired."""
    said = sacrebleu(tmp_path, "-m", "bleu", "--paired-bs", ref=REFERENCES, base=BAD, system=GOOD)
    base, system = (row["BLEU"] for row in said)
    found = paired(GOOD, BAD, REFERENCES, "de")
    assert found["baseline_bleu"] == pytest.approx(base["score"], abs=0.01)
    assert found["bleu"] == pytest.approx(system["score"], abs=0.01)
    assert found["p"] == pytest.approx(system["p_value"], abs=1e-4)
    assert found["bleu"] > found["baseline_bleu"] and found["p"] < 0.05
    assert paired(GOOD, GOOD, REFERENCES, "de")["p"] == 1
    with pytest.raises(ConfigError, match="--baseline: got 39 lines, allowed: 40"):
        paired(GOOD, BAD[1:], REFERENCES, "de")


def test_every_sentence_is_in_one_bucket():
    """Bug: sentences at a border count twice or never, or words of the other side are counted."""
    sources = ["w " * n for n in (1, 9, 10, 19, 20, 45, 60, 300)] * 5
    found = by_length(sources, GOOD, REFERENCES, "de")
    assert {name: row["sentences"] for name, row in found.items()} == {
        "0-9": 10,
        "10-19": 10,
        "20-29": 5,
        "40-59": 5,
        "60-": 10,
    }
    alone = by_length(["w"] * 40, GOOD, REFERENCES, "de")["0-9"]["bleu"]
    assert alone == pytest.approx(confidence(GOOD, REFERENCES, "de")["mean"], abs=1.5)


def test_compounds_are_split_at_hyphens_inside_words():
    """Bug: dashes between words are split too, or one side only is."""
    # By hand: 8 tokens after splitting, one of them wrong at the end; n-grams 7/8 6/7 5/6 4/5.
    got = compound_split_bleu(["ein-Wort hat - zwei x"], ["ein-Wort hat - zwei y"])
    expected = 100 * ((6 / 7) * (5 / 6) * (4 / 5) * (3 / 4)) ** 0.25
    assert got == pytest.approx(expected, abs=1e-6)
    assert compound_split_bleu(GOOD, GOOD) == pytest.approx(100)
