"""Many lines and many files: nothing lost, nothing half written, nothing done twice."""

import io
from pathlib import Path

import pytest

from transformer_jax import bulk
from transformer_jax.bulk import find_jobs, run_jobs, stream
from transformer_jax.config import ConfigError
from transformer_jax.data.files import COMPRESSED


def shout(texts: list[str], first: int) -> list[str]:
    return [f"{first + i}:{text.upper()}" for i, text in enumerate(texts)]


@pytest.fixture()
def parts(tmp_path: Path) -> Path:
    for i in range(5):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.en").write_text(f"a{i}\n\nb{i}\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
@pytest.mark.parametrize("lines", [0, 1, 10, 101])
def test_every_line_is_answered_whatever_the_chunk(lines, size, monkeypatch):
    """Bug: F1, F14: lines at the seams of chunks are lost, doubled or numbered anew."""
    monkeypatch.setattr(bulk, "CHUNK_LINES", size)
    out = io.StringIO()
    stream((f"l{i}" for i in range(lines)), out, shout)
    assert out.getvalue().split("\n")[:-1] == [f"{i + 1}:L{i}" for i in range(lines)]


def test_no_more_than_a_chunk_is_read_ahead(monkeypatch):
    """Bug: F118: the whole input is held before the first line is answered."""
    monkeypatch.setattr(bulk, "CHUNK_LINES", 4)
    read, seen = [], []

    def lines():
        for i in range(20):
            read.append(i)
            yield str(i)

    def translate(texts, first):
        seen.append(len(read) - first + 1)
        return texts

    stream(lines(), io.StringIO(), translate)
    assert max(seen) == 4 and len(seen) == 5


def test_an_interrupted_stream_has_whole_lines():
    """Bug: the last line is cut in the middle, or lines of a chunk that was not done are there."""
    out = io.StringIO()

    def translate(texts, first):
        yield from texts[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(["a", "b", "c", "d"], out, translate)
    assert out.getvalue() == "a\nb\nc\n"


def test_one_output_for_each_input_and_none_is_done_twice(parts):
    """Bug: outputs mixed up; a restart begins anew, or takes a half file for a whole one."""
    out = parts / "out"
    jobs = find_jobs([str(parts / "in" / "*.en")], out)
    calls = []

    def fails(texts, first):
        calls.append(texts)
        if "a3" in texts:
            raise RuntimeError("power cut")
        return shout(texts, first)

    with pytest.raises(RuntimeError, match="power cut"):
        run_jobs(jobs, fails)
    assert sorted(p.name for p in out.iterdir()) == ["0.en", "1.en", "2.en"]
    rest = find_jobs([str(parts / "in" / "*.en")], out)
    assert [Path(job.input).name for job in rest] == ["3.en", "4.en"]
    run_jobs(rest, shout)
    for i in range(5):
        assert (out / f"{i}.en").read_text(encoding="utf-8") == f"1:A{i}\n2:\n3:B{i}\n"
    assert not find_jobs([str(parts / "in" / "*.en")], out)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_disjoint_and_complete(parts, count):
    """Bug: two processes do one file, or none does it; or shares move as files get done."""
    inputs, out = [str(parts / "in" / "*.en")], parts / "out"
    shares = [find_jobs(inputs, out, f"{i}/{count}") for i in range(count)]
    run_jobs(shares[0], shout)
    assert not find_jobs(inputs, out, f"0/{count}")
    assert shares[1:] == [find_jobs(inputs, out, f"{i}/{count}") for i in range(1, count)]
    assert sorted(job.input for share in shares for job in share) == sorted(
        str(path) for path in (parts / "in").iterdir()
    )


def test_refusals_name_what_is_allowed(parts):
    """Bug: an input is overwritten, two inputs share an output, a pattern without files passes."""
    other = parts / "other"
    other.mkdir()
    (other / "1.en").write_text("x\n", encoding="utf-8")
    pattern = str(parts / "in" / "*.en")
    for arguments, words in (
        (([pattern, str(other / "1.en")], parts / "out"), "files of different names"),
        (([pattern], parts / "in"), "not that of the inputs"),
        (([str(parts / "none*")], parts / "out"), "a pattern that some file matches"),
        (([pattern, str(parts / "none")], parts / "out"), "none', allowed: files and patterns"),
        (([pattern], parts / "out", "2/2"), "--share: got '2/2', allowed: I/N"),
        (([pattern], parts / "out", "half"), "--share: got 'half', allowed: I/N"),
    ):
        with pytest.raises(ConfigError) as error:
            find_jobs(*arguments)
        assert words in str(error.value)


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_outputs_are_plain_and_named_so(tmp_path, suffix):
    """Bug: plain text under the name of a compressed file."""
    (tmp_path / f"7.en{suffix}").touch()
    (job,) = find_jobs([str(tmp_path / "*")], tmp_path / "out")
    assert job.output == tmp_path / "out" / "7.en"
