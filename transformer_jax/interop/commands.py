"""Commands of interop: import-..., export-...; __main__.py adds them to its own."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def import_marian(options: argparse.Namespace) -> int:
    """A run directory of a Marian (OPUS-MT) directory of transformers."""
    from transformer_jax.interop import marian

    marian.import_marian(Path(options.source).expanduser(), Path(options.output))
    return 0


def import_m2m100(options: argparse.Namespace) -> int:
    """A run directory of an M2M100 or NLLB-200 directory of transformers."""
    from transformer_jax.interop import m2m100

    m2m100.import_m2m100(Path(options.source).expanduser(), Path(options.output))
    return 0


def import_safetensors(options: argparse.Namespace) -> int:
    """A run directory of what export-safetensors wrote."""
    from transformer_jax.interop import weights

    weights.import_safetensors(Path(options.source).expanduser(), Path(options.output))
    return 0


def export_marian(options: argparse.Namespace) -> int:
    """A directory that transformers' MarianMTModel and MarianTokenizer load."""
    from transformer_jax.interop import marian

    marian.export_marian(_trained(options), Path(options.output))
    return 0


def export_ctranslate2(options: argparse.Namespace) -> int:
    """A directory that ctranslate2.Translator loads."""
    from transformer_jax.interop import ctranslate2

    output = Path(options.output)
    ctranslate2.export_ctranslate2(_trained(options), output, options.quantization)
    return 0


def export_stablehlo(options: argparse.Namespace) -> int:
    """Encoder and decoding step as programs that run without this project."""
    from transformer_jax.interop import stablehlo

    stablehlo.export_stablehlo(_trained(options), Path(options.output))
    return 0


def export_safetensors(options: argparse.Namespace) -> int:
    """A directory with all parameters by our names in one safetensors file."""
    from transformer_jax.interop import weights

    weights.export_safetensors(_trained(options), Path(options.output))
    return 0


Command = Callable[[Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_commands(command: Command) -> None:
    """Declare the commands.

    Args:
        command: adds one, given its function and a line of help.
    """
    for function, help in (
        (import_marian, "a model of transformers' MarianMTModel in"),
        (import_m2m100, "a model of transformers' M2M100 or NLLB-200 in"),
        (import_safetensors, "what export-safetensors wrote, in"),
    ):
        added = command(function, help)
        added.add_argument("--source", required=True, help="directory of the model")
        added.add_argument("--output", required=True, help="run directory; new or empty")
    for function, help in (
        (export_marian, "out to transformers' MarianMTModel"),
        (export_ctranslate2, "out to CTranslate2"),
        (export_stablehlo, "out to programs that need only jax"),
        (export_safetensors, "all parameters out to one file"),
    ):
        added = command(function, help)
        added.add_argument("--checkpoint", required=True, help="run directory, or one step of it")
        added.add_argument("--which", help="best (default), latest or a step")
        added.add_argument("--output", required=True, help="directory; new or empty")
        if function is export_ctranslate2:
            kinds = ("int8", "int8_float32", "int8_float16", "int16", "float16", "float32")
            added.add_argument("--quantization", choices=kinds, help="of weights; default: none")


def _trained(options: argparse.Namespace) -> Any:
    from transformer_jax.decode.trained import load_trained

    return load_trained(options.checkpoint, options.which)
