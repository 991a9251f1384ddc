"""Both commands as people start them: exit codes, one line for a mistake, what goes to stdout."""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

import train
from transformer_jax import __main__ as commands
from transformer_jax import command_line
from transformer_jax import config as configs
from transformer_jax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.interop.weights import write_run
from transformer_jax.model import Model
from transformer_jax.types import Pair

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = ("train.py",)
COMMANDS = ("-m", "transformer_jax")
COMPILED = tempfile.TemporaryDirectory()


def start(
    *arguments: object, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command in the repository, on one CPU device; what it compiles is kept for the next."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(COMPILED.name),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | cache | environment,
        input=stdin,
        capture_output=True,
        check=False,
    )


def refused(*arguments: object, stdin: bytes = b"") -> str:
    """The one line on stderr with which a command refuses; exit code 2, nothing on stdout."""
    result = start(*arguments, stdin=stdin)
    assert (result.returncode, result.stdout) == (2, b""), result.stderr
    return one_line(result.stderr.decode("utf-8"))


def one_line(said: str) -> str:
    assert said.startswith("error: ") and said.endswith("\n") and said.count("\n") == 1, said
    return said


@pytest.fixture()
def refused_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """As `refused`, inside this process: without the seconds that a start takes."""

    def call(main: Callable[[Sequence[str]], int], *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            command_line.run(main)
        out, said = capfd.readouterr()
        assert (stop.value.code, out) == (2, ""), said
        return one_line(said)

    return call


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text files, a config that reads them, and a run directory with random weights."""
    root = tmp_path_factory.mktemp("command line")
    words = "the cat saw a dog and one bird sang".split()
    lines = [" ".join(words[(i * j + 3) % 9] for j in range(1, 5)) for i in range(60)]
    write(root / "a.en", lines)
    write(root / "a.de", [line.upper() for line in lines])
    write(root / "short.de", lines[:59])
    write(root / "few.en", lines[1:5])
    write(root / "few.de", lines[1:5])
    (root / "latin.de").write_bytes(b"gut\n" * 16 + b"caf\xe9\n" + b"gut\n" * 43)
    config = Config(
        model=ModelConfig(d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1),
        tokenizer=TokenizerConfig(vocab_size=300),
        data=DataConfig(
            train_source=(str(root / "a.en"),),
            train_target=(str(root / "a.de"),),
            max_source_tokens=16,
            max_target_tokens=16,
            global_batch_tokens=64,
        ),
        train=TrainConfig(steps=1),
        decode=DecodeConfig(max_extra_tokens=5),
    )
    (root / "tiny.py").write_text(
        "from transformer_jax import config as configs\n"
        f"def get_config():\n    return configs.from_json({configs.to_json(config)!r})\n",
        encoding="utf-8",
    )
    save_run(root / "run", config, [Pair(line, line.upper()) for line in lines])
    return root


def filled(arguments: str, workshop: Path) -> list[str]:
    """Arguments with the paths in them."""
    return [part.format(root=workshop, run=workshop / "run") for part in arguments.split()]


def write(path: Path, lines: Sequence[str]) -> None:
    path.write_bytes("".join(line + "\n" for line in lines).encode("utf-8"))


def save_run(run_dir: Path, config: Config, pairs: Sequence[Pair]) -> None:
    """What training leaves behind, without training."""
    tokenizer = Tokenizer.train(pairs, config.tokenizer)
    model = ModelConfig(**(vars(config.model) | {"vocab_size": tokenizer.vocab_size}))
    params = jax.jit(Model(model).init)(jax.random.key(0))
    write_run(run_dir, params, Config(**vars(config) | {"model": model}), tokenizer)


# ---- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--train.stepss 5", ["--train.stepss"]),
        ("--train.steps many", ["--train.steps", "'many'"]),
        ("--model.norm batchnorm", ["--model.norm", "'batchnorm'", "rmsnorm"]),
        ("--model.ff-bias perhaps", ["--model.ff-bias", "perhaps"]),
        ("--train.steps 0", ["--train.steps: got 0, allowed: a positive number"]),
        ("--seed -1", ["--seed: got -1, allowed: 0 to"]),
        ("--optimizer.learning-rate nan", ["--optimizer.learning-rate: got nan"]),
        ("--train.steps", ["--train.steps"]),
        ("--config", ["--config"]),
        ("--config nowhere.py", ["--config: got 'nowhere.py'"]),
        ("--config configs/quickstart.py:big", ["--config", "quickstart.py:big"]),
        ("--config pyproject.toml", ["--config: got 'pyproject.toml'"]),
        ("surplus", ["surplus"]),
    ],
)
def test_training_refuses_in_one_line(arguments: str, words: list[str]):
    """Bug: a traceback, a page of usage, or a flag that is silently ignored."""
    said = refused(*TRAIN, *arguments.split())
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data.train-source nowhere.en", ["nowhere.en: cannot be read: No such file"]),
        ("--data.train-target {root}/short.de", ["a.en has 60 lines", "short.de has 59"]),
        ("--data.train-target {root}/latin.de", ["latin.de:17: got byte 0xE9", "UTF-8"]),
        ("--data.valid-source {root}/a.en", ["--data.valid-target: got 0 files", "1"]),
        ("--data.train-source", ["--data.train-target: got 1 files, allowed: 0"]),
        ("--mesh.data 3", ["data=3", "number of devices, 8"]),
    ],
)
def test_training_refuses_data_in_one_line(
    workshop: Path, tmp_path: Path, refused_here, arguments: str, words: list[str]
):
    """Bug: F7 and F34: mismatched or broken corpora reach training, or end in a traceback."""
    run = ["--config", workshop / "tiny.py", "--workdir", tmp_path / "run"]
    said = refused_here(train.main, *run, *filled(arguments, workshop))
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists(), "a failed start must not leave a run behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["COMMAND"]),
        ("transalte", ["'transalte'", "translate"]),
        ("translate", ["--checkpoint"]),
        ("translate --checkpoint nowhere", ["nowhere", "not a run directory"]),
        ("translate --checkpoint train.py", ["train.py", "not a run directory"]),
        ("translate --checkpoint {root}", ["not a run directory"]),
        ("translate --checkpoint {run} --beam-size x", ["--beam-size", "'x'"]),
        ("translate --checkpoint {run} --beam-size 0", ["--beam-size", "'0'"]),
        ("translate --checkpoint {run} --length-penalty x", ["--length-penalty", "'x'"]),
        ("translate --checkpoint {run} --wich best", ["--wich"]),
        ("translate --checkpoint {run} --which 7", ["step '7'", "[1]"]),
        ("translate --checkpoint {run} --input {root}/few.en --n-best 9", ["9", "1 to 4"]),
        ("translate --checkpoint {run} --input no.en", ["no.en: cannot be read"]),
        ("translate --checkpoint {run} --output no/way", ["--output: no/way"]),
        ("translate --checkpoint {run} --input {root}/latin.de", ["latin.de:17"]),
        ("evaluate --checkpoint {run} --source {root}/a.en --reference {root}/short.de", ["59"]),
        ("evaluate --checkpoint {run} --source /dev/null --reference /dev/null", ["no pairs"]),
        ("score --checkpoint {run} --source {root}/a.en --target {root}/short.de", ["60", "59"]),
        ("plan --config configs/base.py --model.num-heads 7", ["--model.num-heads: got 7"]),
        ("plan --config configs/base.py --model.heads 7", ["--model.heads"]),
    ],
)
def test_commands_refuse_in_one_line(
    workshop: Path, refused_here, arguments: str, words: list[str]
):
    """Bug: a wrong path or number ends in a traceback, or in an empty answer with exit code 0."""
    said = refused_here(commands.main, *filled(arguments, workshop))
    for word in words:
        assert word in said


def test_a_mistake_is_one_line_of_the_whole_process(workshop: Path, tmp_path: Path):
    """Bug: log lines, or warnings of an import, around the line that says what is wrong."""
    run = ["--config", workshop / "tiny.py", "--workdir", tmp_path / "run"]
    said = refused(*TRAIN, *run, "--data.train-target", workshop / "latin.de")
    assert "latin.de:17: got byte 0xE9" in said
    said = refused(*COMMANDS, "translate", "--checkpoint", workshop / "run", "--which", "7")
    assert "step '7'" in said


def test_standard_input_that_is_not_utf8_is_named(workshop: Path):
    """Bug: the place of a broken byte on stdin is called "0:2", after a file descriptor."""
    run = ["translate", "--checkpoint", workshop / "run"]
    said = refused(*COMMANDS, *run, stdin=b"the cat\ncaf\xe9\n")
    assert "standard input:2: got byte 0xE9" in said


# ---- Help and output ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [TRAIN, COMMANDS, *((*COMMANDS, name) for name in ("translate", "score", "evaluate", "plan"))],
    ids=" ".join,
)
def test_help_works_everywhere(arguments: tuple[str, ...]):
    """Bug: --help is an error, goes to stderr, or dies on a terminal that is not UTF-8."""
    result = start(*arguments, "--help", LC_ALL="C", PYTHONUTF8="0")
    assert (result.returncode, result.stderr) == (0, b"")
    text = result.stdout.decode("utf-8")
    expected = {"train.py": "--train.steps", "transformer_jax": "translate"}
    assert expected.get(arguments[-1], "--c") in text


def test_help_of_training_names_every_field():
    """Bug: a field that no flag can set."""
    text = start(*TRAIN, "--help", COLUMNS="300").stdout.decode("utf-8")
    for section in ("model", "tokenizer", "data", "optimizer", "train", "decode", "mesh"):
        for name in vars(getattr(Config(), section)):
            assert configs.flag(f"{section}.{name}") + " " in text, name
    assert "--config" in text and "--workdir" in text


def test_stdout_carries_only_translations(workshop: Path, tmp_path: Path):
    """Bug: progress or warnings between the translations; lines of a blank or long input lost."""
    long = " ".join(["the cat saw a dog"] * 30)
    text = ["the cat saw a dog", "", long, " \u2028 ", "one\u2028bird sang", "café 爿"]
    stdin = "\n".join(text).encode("utf-8")  # the last line has no line end
    run = ["translate", "--checkpoint", workshop / "run", "--beam-size", "1"]
    result = start(*COMMANDS, *run, stdin=stdin, LC_ALL="C", PYTHONUTF8="0")
    assert result.returncode == 0, result.stderr
    out = result.stdout.decode("utf-8")
    assert out.endswith("\n") and len(out.split("\n")) - 1 == len(out.splitlines()) == len(text)
    assert out.split("\n")[1] == out.split("\n")[3] == ""
    assert result.stderr.decode("utf-8").count("\n") == 1
    assert b"line 3: cut from" in result.stderr

    write(tmp_path / "in.txt", text)
    files = ["--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt"]
    result = start(*COMMANDS, *run, *files)
    assert (result.returncode, result.stdout) == (0, b"")
    assert (tmp_path / "out.txt").read_bytes().decode("utf-8") == out


def test_json_lines_of_translate_and_score(workshop: Path):
    """Bug: --n-best or score writes something that is not one JSON object or list a line."""
    run = ["--checkpoint", workshop / "run"]
    stdin = b"the cat\n\na dog\n"
    result = start(*COMMANDS, "translate", *run, "--n-best", 2, "--beam-size", 2, stdin=stdin)
    first, blank, last = (json.loads(line) for line in result.stdout.decode("utf-8").splitlines())
    assert blank == [] and len(first) == len(last) == 2
    for hypotheses in (first, last):
        scores = [hypothesis["score"] for hypothesis in hypotheses if hypothesis["finished"]]
        assert scores == sorted(scores, reverse=True)

    files = ["--source", workshop / "few.en", "--target", workshop / "few.de"]
    result = start(*COMMANDS, "score", *run, *files)
    scored = [json.loads(line) for line in result.stdout.decode("utf-8").splitlines()]
    assert len(scored) == 4
    for line in scored:
        assert len(line["token_log_probs"]) == line["num_tokens"]
        assert np.isclose(sum(line["token_log_probs"]), line["log_prob"], atol=1e-3)


def test_a_reader_that_leaves_is_no_error(workshop: Path):
    """Bug: "... | head -1" ends in a BrokenPipeError traceback."""
    stdin = b"the cat\n" * 2100  # more than are translated at a time
    command = f'"{sys.executable}" -m transformer_jax translate --beam-size 1 --checkpoint "$1"'
    result = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1", "-", str(workshop / "run")],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        input=stdin,
        capture_output=True,
        check=False,
    )
    assert result.stdout.count(b"\n") == 1 and result.stderr == b""


def test_sigterm_leaves_whole_lines(workshop: Path, tmp_path: Path):
    """Bug: a stopped job leaves half a line, or loses the lines that were done."""
    source, output = tmp_path / "many.en", tmp_path / "many.de"
    write(source, ["the cat saw a dog and one bird sang"] * 40_000)
    names = ["--checkpoint", workshop / "run", "--input", source, "--output", output]
    process = subprocess.Popen(
        [sys.executable, *COMMANDS, "translate", *map(str, names), "--beam-size", "1"],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == 143
    written = output.read_text(encoding="utf-8")
    lines = written.split("\n")
    assert lines.pop() == "" and 0 < len(lines) < 40_000
    assert len(set(lines)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("amid", ["garbage", "a library"])
def test_a_stop_is_never_lost(number: signal.Signals, amid: str):
    """Bug: Python drops what a handler raises while garbage is collected, where JAX has a callback,
    and jaxlib makes a ValueError of what is raised while it compares: the job goes on, or ends in a
    traceback."""

    def collected(phase: str, _: object) -> None:
        if phase == "start":
            os.kill(os.getpid(), number)

    def main(_: object) -> int:
        if amid == "garbage":
            gc.callbacks.append(collected)
            gc.collect()
            gc.callbacks.remove(collected)
            time.sleep(30)
        try:
            os.kill(os.getpid(), number)
        except SystemExit as stop:
            raise ValueError("not comparable") from stop
        return 0

    before = signal.getsignal(number)
    start = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        command_line.run(main)
    assert (stop.value.code, time.monotonic() - start < 20) == (128 + number, True)
    assert signal.getsignal(number) is before


def test_a_stop_that_comes_too_late_ends_nothing_else():
    """Bug: the alarm that would have raised it again kills the process when it is unwatched."""

    def collected(phase: str, _: object) -> None:
        if phase == "start":
            os.kill(os.getpid(), signal.SIGTERM)

    def main(_: object) -> int:
        gc.callbacks.append(collected)
        gc.collect()
        gc.callbacks.remove(collected)
        return 0

    with pytest.raises(SystemExit) as stop:
        command_line.run(main)
    assert (stop.value.code, signal.getitimer(signal.ITIMER_REAL)) == (0, (0.0, 0.0))


@pytest.mark.parametrize(
    ("who", "environment", "starts"),
    [
        ("always [madvise] never", {}, 2),
        ("always [madvise] never", {"GLIBC_TUNABLES": ""}, 1),
        ("[always] madvise never", {}, 1),
        (None, {}, 1),
    ],
)
def test_training_asks_for_huge_pages_once(
    tmp_path: Path, who: str | None, environment: dict[str, str], starts: int
):
    """Bug: it restarts for ever, with other arguments, as another process, or against the user."""
    if who is not None:
        (tmp_path / "enabled").write_text(who + "\n", encoding="ascii")
    (tmp_path / "begin.py").write_text(
        "import os, pathlib, sys\n"
        "from transformer_jax import command_line\n"
        "print(os.getpid(), sys.argv[1:], os.environ.get('GLIBC_TUNABLES'), flush=True)\n"
        f"command_line._HUGE_PAGES = pathlib.Path({str(tmp_path / 'enabled')!r})\n"
        "command_line.use_huge_pages()\n",
        encoding="utf-8",
    )
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-W", "error", tmp_path / "begin.py", "a b", "--c"]
    said = subprocess.check_output(
        command, env=clean | {"PYTHONPATH": str(REPOSITORY)} | environment, text=True
    )
    lines = said.splitlines()
    assert len(lines) == starts
    pid, _, rest = lines[0].partition(" ")
    assert rest == f"['a b', '--c'] {environment.get('GLIBC_TUNABLES')}"
    if starts == 2:
        assert lines[1] == f"{pid} ['a b', '--c'] glibc.malloc.hugetlb=1"


def test_files_in_bulk_with_draws(workshop: Path, tmp_path: Path):
    """Bug: flags of the search, of draws or of bulk mode do not arrive; draws differ by file."""
    flags = ["--temperature", "1", "--top-k", "5", "--seed", "3", "--mbr", "3", "--n-best", "2"]
    common = [*COMMANDS, "translate", "--checkpoint", workshop / "run", *flags]
    result = start(*common, "--input", workshop / "few.*", "--output-dir", tmp_path)
    assert (result.returncode, result.stdout) == (0, b""), result.stderr
    one, other = ((tmp_path / f"few.{end}").read_text(encoding="utf-8") for end in ("en", "de"))
    assert one == other and one.count("\n") == 4
    assert all(len(json.loads(line)) == 2 for line in one.splitlines())
    alone = start(*common, "--input", workshop / "few.en")
    assert alone.stdout.decode("utf-8") == one


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(workshop: Path, tmp_path: Path):
    """Bug: F118: the file, its translations or the programs of its shapes pile up."""
    words = "the cat saw a dog and one bird sang".split()
    peaks = {}
    for count in (10_000, 100_000):
        source, output = tmp_path / "many.en", tmp_path / "many.de"
        write(source, [" ".join(words[: 1 + i * 7 % 5]) for i in range(count)])
        names = ["--checkpoint", workshop / "run", "--input", source, "--output", output]
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "transformer_jax", "translate", *map(str, names)],
            os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)},
        )
        _, status, usage = os.wait4(pid, 0)
        assert status == 0
        with open(output, "rb") as file:
            assert sum(1 for _ in file) == count
        peaks[count] = usage.ru_maxrss / 1024
    print({count: f"{peak:.0f} MiB" for count, peak in peaks.items()})
    assert peaks[100_000] < peaks[10_000] + 50
