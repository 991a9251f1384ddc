"""Commands on a trained run: python -m transformer_jax translate | score | evaluate ..."""

import argparse
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from transformer_jax import bulk, command_line
from transformer_jax.config import ConfigError
from transformer_jax.data.files import read_lines, read_parallel
from transformer_jax.interop import commands as interop
from transformer_jax.types import SamplingOptions

_SEARCH = (
    "beam_size",
    "length_penalty",
    "length_penalty_form",
    "rule",
    "min_length",
    "no_repeat_ngram",
    "max_extra_tokens",
    "max_source_tokens",
    "split",
    "batch_tokens",
    "source_lang",
    "target_lang",
)


def main(arguments: Sequence[str]) -> int:
    """Run one command."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in (plan, data):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.fields = rest
    return options.command(options)


def translate(options: argparse.Namespace) -> int:
    """One output line for each input line, in order."""
    if len(options.input) > 1 and not options.output_dir:
        raise ConfigError(f"--input: got {len(options.input)} files, allowed: 1 or --output-dir")
    jobs = None
    if options.output_dir:
        jobs = bulk.find_jobs(options.input, options.output_dir, options.share)
        if options.prefix:
            raise ConfigError("--prefix: got a file with --output-dir, allowed: one of them")
    prefixes = None if options.prefix is None else read_lines(options.prefix)
    wanted = options.n_best or 1
    search = _search(options, wanted)
    translator = _translator(options)

    def lines(texts: list[str], first: int) -> Iterator[str]:
        prefix = None if prefixes is None else list(itertools.islice(prefixes, len(texts)))
        found = translator.translate_nbest(texts, prefix=prefix, first_line=first, **search)
        for hypotheses in found:
            hypotheses = hypotheses[:wanted]
            if options.n_best or options.scores:
                yield json.dumps([h._asdict() for h in hypotheses], ensure_ascii=False)
            else:
                yield hypotheses[0].text if hypotheses else ""

    if jobs is not None:
        bulk.run_jobs(jobs, lines)
        return 0
    (name,) = options.input
    with _output(options.output, name, options.prefix or "-") as out:
        bulk.stream(_input(name), out, lines)
    return 0


def score(options: argparse.Namespace) -> int:
    """Log-probability of each given translation, one JSON object a line."""
    pairs = read_parallel(options.source, options.target)
    translator = _translator(options)
    languages = {"source_lang": options.source_lang, "target_lang": options.target_lang}
    with _output(options.output, options.source, options.target) as out:
        for start in range(0, len(pairs), bulk.CHUNK_LINES):
            sources, targets = zip(*pairs[start : start + bulk.CHUNK_LINES], strict=True)
            for result in translator.score(sources, targets, **languages):
                out.write(json.dumps(result._asdict()) + "\n")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """sacreBLEU with its signature and chrF of free translations, as one JSON object."""
    from transformer_jax import scores
    from transformer_jax.evaluate import translation_quality

    pairs = read_parallel(options.source, options.reference)
    search = _search(options)
    translator = _translator(options)
    language = options.target_lang or translator.config.data.target_lang
    quality = translation_quality(translator, pairs, language, **search)
    result = {k: v for k, v in quality._asdict().items() if k != "hypotheses"}
    hypotheses, references = quality.hypotheses, [pair.target for pair in pairs]
    if options.confidence:
        result["confidence"] = scores.confidence(hypotheses, references, language)
    if options.by_length:
        sources = [pair.source for pair in pairs]
        result["by_source_words"] = scores.by_length(sources, hypotheses, references, language)
    if options.compound_split:
        result["compound_split_bleu"] = scores.compound_split_bleu(hypotheses, references)
    if options.baseline:
        baseline = list(read_lines(options.baseline))
        result["paired"] = scores.paired(hypotheses, baseline, references, language)
    inputs = (options.source, options.reference, options.baseline or "-")
    if options.hypotheses:
        with _output(options.hypotheses, *inputs) as out:
            out.writelines(text + "\n" for text in hypotheses)
    with _output(options.output, *inputs) as out:
        out.write(json.dumps(result, ensure_ascii=False) + "\n")
    return 0


def generate(options: argparse.Namespace) -> int:
    """One continuation for each line, by a decoder-only model."""
    from transformer_jax.decode.language_model import LanguageModel

    model = LanguageModel.from_checkpoint(options.checkpoint, options.which)

    def lines(prompts: list[str], first: int) -> Iterator[str]:
        yield from model.generate(
            prompts,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed + first - 1,
        )

    with _output(options.output, options.input) as out:
        bulk.stream(_input(options.input), out, lines)
    return 0


def average(options: argparse.Namespace) -> int:
    """Write the mean of the last checkpoints' parameters, for --which average."""
    from transformer_jax.average import average as average_checkpoints

    print(average_checkpoints(options.checkpoint, options.last))
    return 0


def plan(options: argparse.Namespace) -> int:
    """What a config needs, as JSON: parameters, FLOPs, memory, time, batch; for a TPU topology,
    with libtpu installed, also what its compiler says."""
    # Before jax is imported: planning must not take an accelerator from a run, nor ask for one.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    # Where `make plan-tools` puts it: beside the packages, since jax would load it in every run.
    library = os.path.join(sys.prefix, "plan-tools", "libtpu", "libtpu.so")
    if os.path.isfile(library):
        os.environ.setdefault("TPU_LIBRARY_PATH", library)
    from transformer_jax.plan import plan as make_plan

    config = command_line.load_config_file(options.config)
    config = command_line.override(config, options.fields, "plan --config FILE", "Plan a run")
    print(json.dumps(make_plan(config, options.topology, options.mfu), indent=2))
    return 0


def data(options: argparse.Namespace) -> int:
    """What the pipeline makes of the training data: what is kept and dropped, lengths, batches, and
    the first pairs as text, pieces and ids."""
    from pathlib import Path

    from transformer_jax.data.pipeline import train_data
    from transformer_jax.data.sources import load_splits
    from transformer_jax.data.tokenizer import Tokenizer
    from transformer_jax.data.view import view

    config = command_line.load_config_file(options.config)
    config = command_line.override(config, options.fields, "data --config FILE", "Look at data")
    corpus = load_splits(config.data, config.model.encoder_layers > 0).train
    if options.checkpoint:
        tokenizer = Tokenizer.load(Path(options.checkpoint) / "tokenizer")
    else:
        tokenizer = Tokenizer.new(corpus, config.tokenizer, config.data.train_target_langs)
    made = train_data(corpus, tokenizer, config, 1)
    with _output("-") as out:
        for line in view(made, corpus, tokenizer, options.show):
            out.write(line + "\n")
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

    def reads_checkpoint(added: argparse.ArgumentParser, several: bool = False) -> None:
        text = "run directory, or one step of it" + "; several vote" * several
        added.add_argument("--checkpoint", required=True, nargs="+" if several else None, help=text)
        added.add_argument("--which", help="best (default), latest, average or a step")
        added.add_argument("--output", default="-", help="file; - (default): standard output")

    def runs_model(added: argparse.ArgumentParser) -> None:
        added.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations")
        added.add_argument("--mesh", help="DATA,FSDP,MODEL: devices along each axis; -1: the rest")
        added.add_argument("--source-lang", help="of models with language tags; default: the run's")
        added.add_argument("--target-lang", help="likewise")
        added.add_argument("--batch-tokens", type=_positive, help="source tokens of one batch")

    def searches(added: argparse.ArgumentParser) -> None:
        runs_model(added)
        rules = ("exact", "authors", "ctranslate2", "transformers")
        add = added.add_argument_group("search (default: the run's config)").add_argument
        add("--beam-size", type=_positive, help="hypotheses kept; 1: greedy")
        add("--length-penalty", type=float, help="alpha")
        add("--length-penalty-form", choices=("paper", "power"), help="power: length ** alpha")
        add("--rule", choices=rules, help="candidates and stopping")
        add("--min-length", type=_positive, help="tokens that a translation has at least")
        add("--no-repeat-ngram", type=_positive, help="no such sequence comes twice")
        add("--max-extra-tokens", type=int, help="tokens more than the source has")
        add("--max-source-tokens", type=_positive, help="longer sources are cut, with a warning")
        add("--split", action="store_true", help="translate longer sources in parts instead")
        add = added.add_argument_group("draws instead of a search").add_argument
        add("--temperature", type=float, help="1: the model's own distribution")
        add("--top-k", type=_positive, help="only so many of the likeliest tokens")
        add("--top-p", type=float, help="only the likeliest, of so much probability together")
        add("--min-p", type=float, help="only tokens with this share of the likeliest one's")
        add("--seed", type=int, help="line i draws with seed + i")
        add("--mbr", type=_positive, metavar="N", help="of N hypotheses the one most like the rest")

    added = command(translate, "translate lines of text")
    reads_checkpoint(added, several=True)
    searches(added)
    added.add_argument(
        "--input", nargs="+", default=["-"], help="file; - (default): standard input"
    )
    added.add_argument("--output-dir", help="one output for each input; those there are skipped")
    added.add_argument("--share", default="0/1", help="I/N: every Nth file only, from the Ith on")
    added.add_argument("--prefix", help="file: what each translation begins with")
    added.add_argument("--n-best", type=_positive, help="JSON with so many hypotheses a line")
    added.add_argument("--scores", action="store_true", help="JSON with pieces and scores")
    added = command(score, "log-probabilities of given translations")
    reads_checkpoint(added, several=True)
    runs_model(added)
    added.add_argument("--source", required=True, help="file")
    added.add_argument("--target", required=True, help="file")
    added = command(evaluate, "sacreBLEU and chrF on a test set")
    reads_checkpoint(added, several=True)
    searches(added)
    added.add_argument("--source", required=True, help="file")
    added.add_argument("--reference", required=True, help="file")
    added.add_argument("--hypotheses", help="file that the translations are written to")
    added.add_argument("--confidence", action="store_true", help="95 %% interval by bootstrap")
    added.add_argument("--by-length", action="store_true", help="BLEU by words of the source")
    added.add_argument("--compound-split", action="store_true", help="as the paper's figures")
    added.add_argument("--baseline", help="file: another system's translations, for a paired test")
    added = command(generate, "continue lines of text (decoder-only models)")
    reads_checkpoint(added)
    added.add_argument("--input", default="-", help="file; - (default): standard input")
    added.add_argument("--max-tokens", type=_positive, default=64, help="default: 64")
    added.add_argument("--temperature", type=float, default=0.0, help="0 (default): likeliest")
    added.add_argument("--seed", type=int, default=0, help="line i draws with seed + i")
    added = command(average, "mean of the last checkpoints")
    added.add_argument("--checkpoint", required=True, help="run directory")
    added.add_argument("--last", type=_positive, default=5, help="how many; default: 5")
    interop.add_commands(command)
    added = command(data, "what the pipeline makes of the training data")
    added.add_argument("--config", required=True, help="file; any --section.field VALUE may follow")
    added.add_argument("--checkpoint", help="run whose tokenizer to use instead of a new one")
    added.add_argument("--show", type=int, default=5, metavar="N", help="pairs shown; default: 5")
    added = command(plan, "what a config needs, without an accelerator")
    added.add_argument("--config", required=True, help="file; any --section.field VALUE may follow")
    added.add_argument("--topology", default="", help="such as v5e:2x4 or h100:8; default: v5e")
    added.add_argument("--mfu", type=_share, default=0.4, help="share of the peak; default: 0.4")
    return parser


def _translator(options: argparse.Namespace) -> Any:
    """The Translator of --checkpoint and the flags of how it runs."""
    from transformer_jax.config import MeshConfig
    from transformer_jax.decode.translator import Translator

    mesh = None
    if options.mesh:
        try:
            mesh = MeshConfig(*map(int, options.mesh.split(",")))
        except (TypeError, ValueError):
            raise ConfigError(
                f"--mesh: got {options.mesh!r}, allowed: up to three numbers such as 4,1,2"
            ) from None
    return Translator.from_checkpoint(
        options.checkpoint, options.which, mesh=mesh, dtype=options.dtype
    )


def _search(options: argparse.Namespace, wanted: int = 1) -> dict[str, Any]:
    """Keywords of translate_nbest from the flags that were given."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    search = {name: given[name] for name in _SEARCH if name in given}
    sampling = {name: given[name] for name in SamplingOptions._fields if name in given}
    if sampling:
        search["sampling"] = sampling
    if options.mbr:
        search["choose"] = "mbr"
    hypotheses = max(wanted, options.mbr or 1)
    if not sampling and options.beam_size:
        search["beam_size"] = max(options.beam_size, hypotheses)
    return search | {"num_hypotheses": hypotheses}


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: a positive number")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: above 0, up to 1")
    return value


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


if __name__ == "__main__":
    command_line.run(main)
