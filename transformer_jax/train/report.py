"""What a finished run shows: scores on the test parts, translations, curves, the next command."""

import html
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.checkpoint import AVERAGE
from transformer_jax.config import Config
from transformer_jax.decode.language_model import LanguageModel
from transformer_jax.decode.translator import Translator
from transformer_jax.evaluate import Quality, translation_quality
from transformer_jax.train.run_directory import write_whole
from transformer_jax.types import Pair

_SAMPLES = 5  # translations shown, spread over the test parts
_CURVES = ("loss", "perplexity", "teacher_forced_accuracy", "bleu", "chrf", "learning_rate")


def report(run_dir: Path, config: Config, parts: Mapping[str, Sequence[Pair]]) -> None:
    """Score the best checkpoint, or the average, on each part.

    It prints the scores and some translations, and writes results.json and report.html.
    """
    if config.model.encoder_layers:
        results, samples = _translations(run_dir, config, parts)
    else:
        results, samples = _texts(run_dir, config, parts)
    for line in (*_result_lines(results), *_sample_lines(samples)):
        print(line)
    write_whole(run_dir / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    write_whole(run_dir / "report.html", _page(run_dir, config, results, samples))
    python, where = (shlex.quote(os.path.relpath(path)) for path in (sys.executable, run_dir))
    command = "translate" if config.model.encoder_layers else "generate"
    text = samples[0]["source"] if samples else "Hello"
    print(f"Curves:    {where}/report.html")
    print(
        f"{command.capitalize()}: printf '%s\\n' {shlex.quote(text)} | {python} "
        f"-m transformer_jax {command} --checkpoint {where}"
        + (f" --which {AVERAGE}" if _which(config) else "")
    )


def _which(config: Config) -> str | None:
    """The checkpoint that is scored: the average, where the run makes one."""
    return AVERAGE if config.train.average_last else None


def _translations(
    run_dir: Path, config: Config, parts: Mapping[str, Sequence[Pair]]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    translator = Translator.from_checkpoint(run_dir, _which(config))
    results, samples = {}, []
    for name, pairs in parts.items():
        quality: Quality = translation_quality(translator, pairs, config.data.target_lang)
        results[name] = {k: v for k, v in quality._asdict().items() if k != "hypotheses"}
        count = min(len(pairs), -(-_SAMPLES // len(parts)))
        for i in np.linspace(0, len(pairs) - 1, count + 2).astype(int)[1:-1]:
            sample = {"source": pairs[i].source, "reference": pairs[i].target}
            samples.append(sample | {"model": quality.hypotheses[i]})
    return results, samples[:_SAMPLES]


def _texts(
    run_dir: Path, config: Config, parts: Mapping[str, Sequence[Pair]]
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Perplexity, and continuations of the first words of some held-out texts."""
    model = LanguageModel.from_checkpoint(run_dir, _which(config))
    results, samples = {}, []
    for name, pairs in parts.items():
        texts = [pair.target for pair in pairs]
        scores = model.score(texts)
        tokens = sum(score.num_tokens for score in scores)
        loss = -sum(score.log_prob for score in scores) / tokens
        results[name] = {"loss": loss, "perplexity": float(np.exp(loss)), "tokens": tokens}
        for text in texts[: -(-_SAMPLES // len(parts))]:
            prompt = " ".join(text.split()[:3])
            continued = model.generate([prompt])[0]
            samples.append({"source": prompt, "reference": text, "model": continued})
    return results, samples[:_SAMPLES]


def _result_lines(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, r in results.items():
        if "bleu" in r:
            lines.append(
                f"{name}: sacreBLEU {r['bleu']:.1f} ({r['signature']}), chrF {r['chrf']:.1f}, "
                f"exact {r['exact']:.1f} % of {r['sentences']} sentences, "
                f"{r['tokens_per_sec']:.0f} tokens/s"
            )
        else:
            lines.append(f"{name}: perplexity {r['perplexity']:.2f} of {r['tokens']} tokens")
    return lines


def _sample_lines(samples: list[dict[str, str]]) -> list[str]:
    return [f"    {key:<9} {text}" for sample in samples for key, text in sample.items()]


def _page(run_dir: Path, config: Config, results: dict[str, Any], samples: list) -> str:
    """One HTML page that needs nothing else: curves, scores, samples, the configuration."""
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(s[key])}</td>' for key in s)}</tr>" for s in samples
    )
    scores = "".join(f"<p>{html.escape(line)}</p>" for line in _result_lines(results))
    settings = html.escape((run_dir / "config.json").read_text(encoding="utf-8"))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(run_dir.name)}</title>"
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "td{border-top:1px solid #ccc;padding:.4em;vertical-align:top}svg{max-width:100%}"
        "</style>"
        f"<h1>{html.escape(run_dir.name)}: {config.data.source_lang} to "
        f"{config.data.target_lang}</h1>{scores}{_curves(run_dir / 'metrics.jsonl')}"
        f"<table><tr><th>source<th>reference<th>model</tr>{rows}</table>"
        f"<details><summary>config.json</summary><pre>{settings}</pre></details>\n"
    )


def _curves(metrics: Path) -> str:
    """The run's curves as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    names = [name for name in _CURVES if any(name in line for line in lines)]
    figure = Figure(figsize=(10, 3 * -(-len(names) // 2)), layout="constrained")
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(-(-len(names) // 2), 2, place)
        for part in ("train", "valid"):
            points = [(x["step"], x[name]) for x in lines if x["part"] == part and name in x]
            if points:
                axes.plot(*zip(*points, strict=True), label=part, marker="." * (part == "valid"))
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel("step")
        axes.legend()
    picture = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "transformer_jax"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    text = picture.getvalue()
    return text[text.index("<svg") :]
