"""The house: which file stands on which floor, and what inference can do without."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "transformer_jax"

# A file imports only from lower floors; inside a folder, also what is named before it.
FLOORS: dict[str, int] = {
    "config": 0,
    "types": 0,
    "runtime": 1,
    "sharding": 1,
    "processes": 2,
    "data": 1,
    "checkpoint": 3,
    "model": 2,
    "train": 4,
    "decode": 5,
    "interop": 6,
    "evaluate": 7,
    "topology": 5,
    "plan": 7,
    "average": 7,
    "scores": 8,
    "train.report": 8,
    "train.loop": 8,
    "command_line": 8,
    "bulk": 8,
    "__main__": 9,
}
ORDER: dict[str, list[str]] = {
    "data": [
        *["pieces", "tokenizer", "catalogues", "cldr", "embedded", "files", "prepared"],
        *["sources", "order", "filters", "batching", "packing", "alignment"],
        *["store", "sampling", "pipeline", "view"],
    ],
    "model": [
        *["masks", "dropout", "positions", "blockwise", "linear"],
        *["attention", "layers", "transformer"],
    ],
    "train": [
        *["loss", "optimizer", "state", "step", "metrics", "stop", "run_directory"],
        *["evidence"],
        *["report", "loop"],
    ],
    "decode": [
        *["search", "sampling", "engine", "trained", "sentences"],
        *["translator", "language_model"],
    ],
    "interop": [
        *["directory", "tensors", "weights", "bart", "marian", "m2m100"],
        *["ctranslate2", "stablehlo", "commands"],
    ],
}
# Modules that may not be imported, even inside a function: by folder or file, by first name.
FORBIDDEN: dict[str, set[str]] = {
    "config": {"jax", "numpy"},
    "types": {"jax", "numpy"},
    "data": {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow"},
    "model": {"optax", "orbax", "tensorflow_datasets", "tensorflow", "grain", "sentencepiece"},
    "checkpoint": {"optax", "tensorflow_datasets", "tensorflow", "flax"},
    "decode": {"optax", "orbax", "tensorflow_datasets", "tensorflow", "grain"},
    "evaluate": {"optax", "orbax", "tensorflow_datasets", "tensorflow"},
}


def modules() -> list[str]:
    """Every module of the package, as data.tokenizer; __init__ files are not asked for here."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.parts) for path in paths if path.name != "__init__")


def imports(module: str) -> set[str]:
    """Full names of all that a module imports, wherever in the file it does so."""
    return imports_of((PACKAGE / module.replace(".", "/")).with_suffix(".py"))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(names: set[str]) -> set[str]:
    """The modules of this package among imported names: data.tokenizer for its Tokenizer too."""
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != "transformer_jax":
            continue
        while parts[1:] and not is_module(parts[1:]):
            parts.pop()
        if parts[1:]:
            found.add(".".join(parts[1:]))
    return found


def is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def floor(module: str) -> int:
    return FLOORS.get(module, FLOORS.get(module.partition(".")[0], -1))


def rank(module: str) -> int:
    """Place inside a folder; the folder's own __init__ offers what stands in its last file."""
    folder, _, name = module.partition(".")
    return ORDER[folder].index(name) if name else len(ORDER[folder])


# ---- Floors -------------------------------------------------------------------------------------


def test_every_file_has_a_floor():
    """Bug: a new file that no rule covers, or a rule for a file that is gone."""
    for module in modules():
        assert floor(module) >= 0, f"{module}: give it a floor"
        folder, _, name = module.partition(".")
        assert not name or name in ORDER[folder], f"{module}: give it a place in its folder"
    for folder, names in ORDER.items():
        for name in names:
            assert f"{folder}.{name}" in modules()


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module: str):
    """Bug: a lower floor knows of a higher one, or two files of one floor of each other."""
    folder = module.partition(".")[0]
    for imported in own(imports(module)):
        same_folder = "." in module and imported.partition(".")[0] == folder
        if same_folder and floor(imported) == floor(module):
            assert rank(imported) < rank(module), f"{module} imports {imported}, named after it"
        else:
            assert floor(imported) < floor(module), f"{module} imports {imported} from above"


def test_entry_points_and_configs_import_what_they_may():
    """Bug: a config file that computes, or a train.py that knows the model."""
    assert own(imports_of(REPOSITORY / "train.py")) == {"command_line", "train.loop"}
    for path in (REPOSITORY / "configs").glob("*.py"):
        assert own(imports_of(path)) <= {"config", "command_line"}, path


def test_checkpoint_and_model_do_not_know_each_other():
    """Bug: weights can be read only with this model, or the model knows about files."""
    assert not {name for name in own(imports("checkpoint")) if name.startswith("model")}
    for name in ORDER["model"]:
        assert "checkpoint" not in own(imports(f"model.{name}"))


def test_search_knows_no_model_and_decode_of_data_only_the_tokenizer():
    """Bug: beam search that cannot be tested without a network; inference that needs the corpus."""
    assert own(imports("decode.search")) == set()
    for name in ORDER["decode"]:
        from_data = {m for m in own(imports(f"decode.{name}")) if m.startswith("data")}
        assert from_data <= {"data.tokenizer"}
        assert not {m for m in own(imports(f"decode.{name}")) if m.startswith("train")}


@pytest.mark.parametrize("place", FORBIDDEN)
def test_walls(place: str):
    """Bug: text processing that needs jax, a model that needs an optimizer library."""
    for module in modules():
        if module == place or module.startswith(place + "."):
            first = {name.partition(".")[0] for name in imports(module)}
            assert not first & FORBIDDEN[place], module


def test_no_drawer_for_everything():
    """Bug: a utils module, in which things have no name."""
    assert not {part for m in modules() for part in m.split(".")} & {"utils", "common", "helpers"}


# ---- What is loaded -----------------------------------------------------------------------------


def python(code: str, *arguments: str) -> str:
    """Run code in a fresh process; its output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # quicker compilation
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_text_processing_loads_no_jax():
    """Bug: a data worker that starts a JAX backend, or takes seconds to import."""
    loaded = python("""
        import sys
        import transformer_jax.data.tokenizer, transformer_jax.data.sources
        import transformer_jax.data.batching, transformer_jax.data.pipeline
        import transformer_jax.data.embedded, transformer_jax.data.catalogues
        import transformer_jax.types, transformer_jax.config
        heavy = {"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorflow"}
        print(sorted(heavy & sys.modules.keys()), "tensorflow_datasets" in sys.modules)
    """)
    assert loaded == "[] False\n"


def test_public_names_are_there_and_lazy():
    """Bug: `from transformer_jax import Translator` fails, or the bare import loads jax."""
    code = """
        import sys
        import transformer_jax
        assert "jax" not in sys.modules
        for name in transformer_jax.__all__:
            assert getattr(transformer_jax, name).__name__ == name
        try:
            transformer_jax.nothing
        except AttributeError as error:
            print(error)
    """
    assert "nothing" in python(code)


def test_inference_works_without_training_libraries(tmp_path: Path):
    """Bug: a laptop that only translates must install optax, TensorFlow and TFDS."""
    code = """
        import sys

        blocked = ["optax", "tensorflow", "tensorflow_datasets", "grain", "tensorboardX"]
        sys.modules.update(dict.fromkeys(blocked))  # None: as if not installed
        import jax
        from pathlib import Path
        from transformer_jax import Translator, config as configs
        from transformer_jax.checkpoint import Checkpoints
        from transformer_jax.config import Config, DecodeConfig, ModelConfig, TokenizerConfig
        from transformer_jax.data.tokenizer import Tokenizer
        from transformer_jax.model import Model

        run_dir = Path(sys.argv[1])
        lines = [(" ".join("abcdefgh"[i % n] for i in range(n)), "x y z") for n in range(1, 9)]
        tokenizer = Tokenizer.train(lines, TokenizerConfig(vocab_size=272))
        tokenizer.save(run_dir / "tokenizer")
        model = ModelConfig(
            vocab_size=tokenizer.vocab_size, d_model=8, d_ff=8, num_heads=2,
            encoder_layers=1, decoder_layers=1,
        )
        config = Config(model=model, decode=DecodeConfig(beam_size=1, max_extra_tokens=2))
        (run_dir / "config.json").write_text(configs.to_json(config))
        checkpoints = Checkpoints(
            run_dir, keep_latest=1, keep_best=0, best_metric="loss",
            fingerprint=tokenizer.fingerprint,
        )
        checkpoints.save(3, {"params": jax.jit(Model(model).init)(jax.random.key(0))}, None)
        checkpoints.close()
        translator = Translator.from_checkpoint(run_dir)
        assert len(translator.translate(["a b c", ""])) == 2
        assert translator.score(["a b"], ["x"])[0].num_tokens > 1
        assert not [name for name in blocked if sys.modules[name]]
        print("translated")
    """
    assert python(code, str(tmp_path)) == "translated\n"
