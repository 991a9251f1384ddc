"""From the paper's recipe to configs/modern.py, one change at a time, at equal time.

    make bench NAME=ablation ARGS='--config configs/multi30k.py:DIR --secs 240'

Each row has all changes of the rows above. Every run gets the same seconds of training: a few
steps say how fast it is, and so how many steps its schedule has. The figure is the loss on the
validation pairs, in nats a token without smoothing, at the end. `--only 1 5` runs some rows.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PAPER = """
    --model.norm-position post --model.norm layernorm --model.activation relu
    --model.positions sinusoidal --optimizer.name adam --optimizer.schedule noam
    --optimizer.clip-norm 0
"""
CHANGES = {
    "the paper's: post-norm, Adam, noam": PAPER,
    "+ pre-norm, clipping": "--model.norm-position pre --optimizer.clip-norm 1",
    "+ cosine to 0": "--optimizer.schedule cosine --optimizer.learning-rate 2e-3",
    "+ RMSNorm, no biases": "--model.norm rmsnorm --model.ff-bias False",
    "+ SwiGLU of the same size": "--model.activation swiglu --model.d-ff {two_thirds}",
    "+ rotary positions": "--model.positions rotary",
    "+ Muon": "--optimizer.name muon",
}
_WARMUP = 0.15  # of the steps
_MEASURED = 40


def trained(config: str, flags: list[str], steps: int, workdir: Path) -> list[dict]:
    """The lines of metrics.jsonl of a run of some steps."""
    command = [sys.executable, "train.py", "--config", config, "--workdir", str(workdir), *flags]
    command += ["--train.steps", str(steps), "--train.eval-every-steps", "0"]
    command += ["--train.eval-bleu-sentences", "0", "--train.average-last", "0"]
    command += ["--train.checkpoint-every-steps", "0", "--train.log-every-steps", "10"]
    command += ["--data.test-source", "--data.test-target"]
    # The report at the end translates, which is not what is asked here: as quickly as it can.
    command += ["--decode.beam-size", "1", "--decode.max-extra-tokens", "0"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return list(map(json.loads, (workdir / "metrics.jsonl").read_text("utf-8").splitlines()))


def main() -> None:
    """Train the rows in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/quickstart.py")
    parser.add_argument("--secs", type=float, default=240, help="training time of each row")
    parser.add_argument("--d-ff", type=int, default=512, help="width of the feed-forward sublayer")
    parser.add_argument("--factor", type=float, default=0.25, help="of the noam schedule")
    parser.add_argument("--only", type=int, nargs="+", help="rows, counted from 0")
    options = parser.parse_args()
    flags = ["--model.d-ff", str(options.d_ff), "--optimizer.learning-rate", str(options.factor)]
    two_thirds = round(options.d_ff * 2 / 3 / 32) * 32
    print("| | steps | s a step | validation loss |\n|---|---:|---:|---:|", flush=True)
    for row, (name, change) in enumerate(CHANGES.items()):
        flags += change.format(two_thirds=two_thirds).split()
        if options.only and row not in options.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            first = trained(options.config, flags, _MEASURED, Path(directory, "first"))
            rates = [line["steps_per_sec"] for line in first if line["part"] == "train"]
            secs = 1 / statistics.median(rates[1:])  # the first holds the compilation
            steps = int(options.secs / secs)
            warmup = ["--optimizer.warmup-steps", str(int(_WARMUP * steps))]
            lines = trained(options.config, flags + warmup, steps, Path(directory, "run"))
        loss = [line["loss"] for line in lines if line["part"] == "valid"][-1]
        print(f"| {name} | {steps} | {secs:.2f} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main()
