"""Commands on a trained run: python -m transformer_jax translate | score | evaluate ..."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from transformer_jax import command_line
from transformer_jax.config import ConfigError
from transformer_jax.data.sources import read_lines, read_parallel

# Lines translated at a time: enough to sort by length, few enough to hold.
_CHUNK_LINES = 2048


def main(arguments: Sequence[str]) -> int:
    """Run one command."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command is not plan:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.fields = rest
    return options.command(options)


def translate(options: argparse.Namespace) -> int:
    """One output line for each input line, in order."""
    from transformer_jax.decode.translator import Translator

    translator = Translator.from_checkpoint(options.checkpoint, options.which)
    wanted = options.n_best or 1
    with _output(options.output, options.input) as out:
        for first, chunk in _chunks(_input(options.input)):
            found = translator.translate_nbest(
                chunk,
                num_hypotheses=wanted,
                beam_size=options.beam_size and max(options.beam_size, wanted),
                length_penalty=options.length_penalty,
                first_line=first,
            )
            for hypotheses in found:
                if options.n_best or options.scores:
                    line = json.dumps([h._asdict() for h in hypotheses], ensure_ascii=False)
                else:
                    line = hypotheses[0].text if hypotheses else ""
                out.write(line + "\n")
            out.flush()
    return 0


def score(options: argparse.Namespace) -> int:
    """Log-probability of each given translation, one JSON object a line."""
    from transformer_jax.decode.translator import Translator

    pairs = read_parallel(options.source, options.target)
    translator = Translator.from_checkpoint(options.checkpoint, options.which)
    with _output(options.output, options.source, options.target) as out:
        for start in range(0, len(pairs), _CHUNK_LINES):
            chunk = pairs[start : start + _CHUNK_LINES]
            sources, targets = zip(*chunk, strict=True)
            for result in translator.score(sources, targets):
                out.write(json.dumps(result._asdict()) + "\n")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """sacreBLEU with its signature and chrF of free translations, as one JSON object."""
    from transformer_jax.decode.translator import Translator
    from transformer_jax.evaluate import translation_quality

    pairs = read_parallel(options.source, options.reference)
    translator = Translator.from_checkpoint(options.checkpoint, options.which)
    quality = translation_quality(
        translator,
        pairs,
        translator.config.data.target_lang,
        beam_size=options.beam_size,
        length_penalty=options.length_penalty,
    )
    result = {k: v for k, v in quality._asdict().items() if k != "hypotheses"}
    with _output(options.output, options.source, options.reference) as out:
        out.write(json.dumps(result, ensure_ascii=False) + "\n")
    return 0


def generate(options: argparse.Namespace) -> int:
    """One continuation for each line, by a decoder-only model."""
    from transformer_jax.decode.language_model import LanguageModel

    model = LanguageModel.from_checkpoint(options.checkpoint, options.which)
    with _output(options.output, options.input) as out:
        for first, chunk in _chunks(_input(options.input)):
            for text in model.generate(
                chunk,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=options.seed + first - 1,
            ):
                out.write(text + "\n")
            out.flush()
    return 0


def plan(options: argparse.Namespace) -> int:
    """What a config needs, as JSON: parameters by part, size of a checkpoint."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # planning must not take an accelerator from a run
    from transformer_jax.plan import plan as make_plan

    config = command_line.load_config_file(options.config)
    config = command_line.override(config, options.fields, "plan --config FILE", "Plan a run")
    print(json.dumps(make_plan(config), indent=2))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(prog="python -m transformer_jax", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            function.__name__.replace("_", "-"), help=help, description=function.__doc__
        )
        added.set_defaults(command=function)
        return added

    def reads_checkpoint(added: argparse.ArgumentParser) -> None:
        added.add_argument("--checkpoint", required=True, help="run directory, or one step of it")
        added.add_argument("--which", help="best (default), latest or a step")
        added.add_argument("--output", default="-", help="file; - (default): standard output")

    def searches(added: argparse.ArgumentParser) -> None:
        added.add_argument("--beam-size", type=_positive, help="default: the run's config")
        added.add_argument("--length-penalty", type=float, help="default: the run's config")

    added = command(translate, "translate lines of text")
    reads_checkpoint(added)
    searches(added)
    added.add_argument("--input", default="-", help="file; - (default): standard input")
    added.add_argument("--n-best", type=_positive, help="JSON with so many hypotheses a line")
    added.add_argument("--scores", action="store_true", help="JSON with pieces and scores")
    added = command(score, "log-probabilities of given translations")
    reads_checkpoint(added)
    added.add_argument("--source", required=True, help="file")
    added.add_argument("--target", required=True, help="file")
    added = command(evaluate, "sacreBLEU and chrF on a test set")
    reads_checkpoint(added)
    searches(added)
    added.add_argument("--source", required=True, help="file")
    added.add_argument("--reference", required=True, help="file")
    added = command(generate, "continue lines of text (decoder-only models)")
    reads_checkpoint(added)
    added.add_argument("--input", default="-", help="file; - (default): standard input")
    added.add_argument("--max-tokens", type=_positive, default=64, help="default: 64")
    added.add_argument("--temperature", type=float, default=0.0, help="0 (default): likeliest")
    added.add_argument("--seed", type=int, default=0, help="line i draws with seed + i")
    added = command(plan, "what a config needs, without an accelerator")
    added.add_argument("--config", required=True, help="file; any --section.field VALUE may follow")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a positive number")
    return int(text)


def _input(name: str) -> Iterator[str]:
    return read_lines(name if name != "-" else sys.stdin.fileno())


def _output(name: str, *inputs: str) -> TextIO:
    """UTF-8 and "\\n" whatever the locale; standard output is not closed by `with`."""
    for path in inputs:
        if "-" not in (name, path) and os.path.exists(name) and os.path.samefile(name, path):
            raise ConfigError(f"--output: got {name}, allowed: another file than the input")
    target = name if name != "-" else sys.stdout.fileno()
    try:
        return open(target, "w", encoding="utf-8", newline="\n", closefd=name != "-")
    except OSError as error:
        raise ConfigError(f"--output: {name}: cannot be written: {error.strerror}") from None


def _chunks(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Lists of lines with the number of the first, counted from 1."""
    first, chunk = 1, []
    for line in lines:
        chunk.append(line)
        if len(chunk) == _CHUNK_LINES:
            yield first, chunk
            first, chunk = first + len(chunk), []
    if chunk:
        yield first, chunk


if __name__ == "__main__":
    command_line.run(main)
