"""The configuration: strict JSON, one line for each mistake, no field without a reader."""

import ast
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from transformer_jax import config as configs
from transformer_jax.command_line import load_config_file
from transformer_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    DecodeConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TokenizerConfig,
    TrainConfig,
)

PACKAGE = Path(configs.__file__).parent


def message(call, *args) -> str:
    """The one line with which `call` refuses."""
    with pytest.raises(ConfigError) as error:
        call(*args)
    text = str(error.value)
    assert "\n" not in text
    return text


def leaves(tree, prefix: str = "") -> dict[str, object]:
    """Every field of a Config, by dotted name."""
    found: dict[str, object] = {}
    for item in dataclasses.fields(tree):
        value = getattr(tree, item.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = value
    return found


def replaced(path: str, value: object) -> Config:
    """The default Config with one field changed."""
    section, _, name = path.rpartition(".")
    if not section:
        return dataclasses.replace(Config(), **{name: value})
    part = dataclasses.replace(getattr(Config(), section), **{name: value})
    return dataclasses.replace(Config(), **{section: part})


def other(value: object) -> object:
    """A value of the same type that is not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 2
    if isinstance(value, float):
        return value / 2 + 0.25
    if isinstance(value, tuple):
        return ("ä b.txt", "c")
    return value


# ---- JSON ---------------------------------------------------------------------------------------


def test_json_brings_back_every_field():
    """Bug: a field is lost, or comes back as another type (a tuple as a list)."""
    changed = Config()
    for path, value in leaves(Config()).items():
        section, _, name = path.rpartition(".")
        new = {name: (1.5, 2.0) if path == "data.train_weights" else other(value)}
        if section:
            new = {section: dataclasses.replace(getattr(changed, section), **new)}
        changed = dataclasses.replace(changed, **new)
    # Sizes that fit together again.
    changed = dataclasses.replace(
        changed,
        model=dataclasses.replace(
            changed.model, d_model=60, num_heads=10, norm="rmsnorm", tied_embeddings="none"
        ),
        mesh=MeshConfig(data=-1, fsdp=3, model=3),
        data=dataclasses.replace(changed.data, max_length_ratio=2.0),
    )
    changed = configs.check(changed)
    back = configs.from_json(configs.to_json(changed))
    assert back == changed
    for path, value in leaves(back).items():
        assert type(value) is type(leaves(changed)[path]), path


def test_json_names_every_field_and_the_version():
    """Bug: a default is left out, so that a later change of it changes old runs."""
    tree = json.loads(configs.to_json(Config()))
    assert tree.pop("format_version") == configs.FORMAT_VERSION
    flat = {
        f"{section}.{name}" if isinstance(fields, dict) else section
        for section, fields in tree.items()
        for name in (fields if isinstance(fields, dict) else [""])
    }
    assert flat == set(leaves(Config()))


def test_absent_fields_take_their_defaults():
    """Bug: a config.json written before a field existed cannot be read."""
    assert configs.from_json('{"format_version": 1, "train": {"steps": 7}}') == replaced(
        "train.steps", 7
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format_version": 1, "optimiser": {}}', ["unknown field", "'optimiser'"]),
        ('{"format_version": 1, "model": {"d_modle": 8}}', ["unknown field", "'model.d_modle'"]),
        ('{"format_version": 1, "model": {"d_model": "512"}}', ["model.d_model", "'512'", "int"]),
        ('{"format_version": 1, "model": {"d_model": 512.0}}', ["model.d_model", "512.0", "int"]),
        ('{"format_version": 1, "model": {"d_model": true}}', ["model.d_model", "True", "int"]),
        ('{"format_version": 1, "model": {"d_model": null}}', ["model.d_model", "None", "int"]),
        ('{"format_version": 1, "model": {"dropout": "x"}}', ["model.dropout", "'x'", "float"]),
        ('{"format_version": 1, "model": {"dropout": NaN}}', ["model.dropout", "nan", "finite"]),
        ('{"format_version": 1, "model": {"ff_bias": 1}}', ["model.ff_bias", "1", "bool"]),
        ('{"format_version": 1, "model": {"norm": "LN"}}', ["model.norm", "'LN'", "rmsnorm"]),
        ('{"format_version": 1, "model": 3}', ["model", "3", "ModelConfig"]),
        (
            '{"format_version": 1, "data": {"train_source": "a.txt"}}',
            ["data.train_source", "a.txt"],
        ),
        ('{"format_version": 1, "data": {"train_source": [1]}}', ["data.train_source", "1", "str"]),
        ('{"format_version": 1, "train": {"steps": 0}}', ["--train.steps", "0", "positive"]),
        ("{}", ["format_version", "None", "1"]),
        ('{"format_version": 99}', ["format_version", "99", "1 to 1"]),
        ('{"format_version": "1"}', ["format_version", "'1'"]),
        ("[]", ["list", "an object"]),
        ("{\n", ["run/config.json:2", "not JSON"]),
    ],
)
def test_json_mistakes_are_named_in_one_line(text: str, words: list[str]):
    """Bug: a misspelt or mistyped field is taken silently, or ends in a traceback."""
    said = message(configs.from_json, text, "run/config.json")
    assert said.startswith("run/config.json") or said.startswith("--")
    for word in words:
        assert word in said, said


def test_json_takes_a_whole_number_for_a_float():
    """Bug: 1 instead of 1.0, as people write it, is refused, or stays an int."""
    config = configs.from_json('{"format_version": 1, "optimizer": {"learning_rate": 1}}')
    assert type(config.optimizer.learning_rate) is float


@pytest.mark.parametrize("name", ["nowhere/config.json", "file/config.json", "latin/config.json"])
def test_a_directory_that_is_no_run_is_said_in_one_line(tmp_path: Path, name: str):
    """Bug: NotADirectoryError or UnicodeDecodeError instead of a sentence with the path."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "latin").mkdir()
    (tmp_path / "latin" / "config.json").write_bytes(b'{"x": "\xe9"}')
    assert str(tmp_path / name) in message(configs.load, tmp_path / name)


# ---- Sizes that cannot work ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        ("seed", -1, "0 to"),
        ("seed", 2**31, "0 to"),
        ("model.d_model", 0, "positive"),
        ("model.d_model", 513, "divisor"),
        ("model.num_heads", 7, "divisor of --model.d-model (512)"),
        ("model.d_ff", -1, "positive"),
        ("model.decoder_layers", 0, "positive"),
        ("model.encoder_layers", -1, "0 or more"),
        ("model.dropout", 1.0, "not including, 1"),
        ("model.embedding_dropout", -0.1, "not including, 1"),
        ("model.attention_dropout", 1.5, "not including, 1"),
        ("model.activation_dropout", math.nan, "finite"),
        ("model.norm_epsilon", 0.0, "positive"),
        ("tokenizer.vocab_size", 0, "positive"),
        ("data.global_batch_tokens", 255, "at least --data.max-source-tokens (256)"),
        ("data.num_buckets", 0, "positive"),
        ("optimizer.learning_rate", -1.0, "0 or more"),
        ("optimizer.learning_rate", math.inf, "finite"),
        ("optimizer.b1", 1.0, "not including, 1"),
        ("optimizer.b2", -0.5, "not including, 1"),
        ("optimizer.epsilon", 0.0, "positive"),
        ("optimizer.warmup_steps", -1, "0 or more"),
        ("train.steps", 0, "positive"),
        ("train.label_smoothing", 1.0, "not including, 1"),
        ("train.keep_checkpoints", 0, "positive"),
        ("train.log_every_steps", 0, "positive"),
        ("decode.beam_size", 0, "positive"),
        ("decode.length_penalty", math.nan, "finite"),
        ("decode.max_extra_tokens", -1, "0 or more"),
        ("mesh.data", 0, "-1 for the rest"),
        ("mesh.fsdp", -2, "-1 for the rest"),
    ],
)
def test_impossible_sizes_name_field_got_and_allowed(path: str, value: object, allowed: str):
    """Bug: the mistake shows after minutes, as a shape error, a division by zero or a NaN."""
    said = message(configs.check, replaced(path, value))
    assert "--" + path.split(".")[0] in said and "got " in said and allowed in said, said
    if "divisor" not in allowed:
        assert said.startswith(f"{configs.flag(path)}: got {value!r}, allowed: "), said


def test_two_open_mesh_axes_are_refused():
    """Bug: with two -1 the sizes are a guess."""
    config = dataclasses.replace(Config(), mesh=MeshConfig(data=-1, fsdp=-1))
    assert "-1 for one axis only" in message(configs.check, config)


def test_odd_width_needs_other_positions():
    """Bug: an odd d_model breaks the sinusoids deep inside the model (F43)."""
    odd = ModelConfig(d_model=45, num_heads=5)
    assert "even number" in message(configs.check, dataclasses.replace(Config(), model=odd))
    without = dataclasses.replace(odd, positions="none")
    configs.check(dataclasses.replace(Config(), model=without))


def test_head_widths_free_the_model_width():
    """Bug: d_model % num_heads is asked for although d_k and d_v are given (table 3, row B)."""
    model = ModelConfig(d_model=512, num_heads=7, d_k=16, d_v=64)
    configs.check(dataclasses.replace(Config(), model=model))


def test_defaults_are_the_base_model_of_the_paper():
    """Bug: a default drifts away from table 3 and section 5 of the paper."""
    c = configs.check(Config())
    model = c.model
    assert (model.d_model, model.d_ff, model.num_heads) == (512, 2048, 8)
    assert (model.encoder_layers, model.decoder_layers) == (6, 6)
    assert (model.norm_position, model.activation, model.positions) == (
        "post",
        "relu",
        "sinusoidal",
    )
    assert (model.dropout, c.train.label_smoothing) == (0.1, 0.1)
    assert (model.tied_embeddings, model.embedding_scale) == ("all", True)
    assert c.optimizer == OptimizerConfig(
        "adam", 0.9, 0.98, 1e-9, 0.0, "noam", 1.0, warmup_steps=4000
    )
    assert c.decode == DecodeConfig(beam_size=4, length_penalty=0.6, max_extra_tokens=50)


# ---- Fields and their readers -------------------------------------------------------------------


def test_every_field_is_read_outside_of_config():
    """Bug: a field that nobody reads: setting it does nothing."""
    read: set[str] = set()
    text = ""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "config.py":
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            if isinstance(node, ast.JoinedStr):  # getattr(config, f"{part}_source")
                text += ast.unparse(node)
    unread = []
    for path in leaves(Config()):
        name = path.rpartition(".")[2]
        ending = "_" + name.rpartition("_")[2]
        split = name.partition("_")[0] in ("train", "valid", "test")
        if name not in read and not (split and f"}}{ending}'" in text.replace('"', "'")):
            unread.append(path)
    # tfds_*_split, mesh sizes and the like are attributes too: nothing is excused here.
    assert not unread


def test_every_field_but_the_obvious_ones_says_what_it_is():
    """Bug: a field without a meaning in --help. Adam's three have none but the paper's names."""
    tree = ast.parse(Path(configs.__file__).read_text(encoding="utf-8"))
    silent = set()
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        body = [*cls.body, None]
        for item, after in itertools.pairwise(body):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(item, ast.AnnAssign) and not said:
                silent.add(ast.unparse(item.target))
    sections = {field.name for field in dataclasses.fields(Config)} - {"seed"}
    assert silent - sections <= {"b1", "b2", "epsilon", "data", "fsdp", "model"}


# ---- Differences --------------------------------------------------------------------------------


def test_differences_names_each_changed_field():
    """Bug: a resumed run overlooks a changed field, or reports one that is the same."""
    assert configs.differences(Config(), Config()) == {}
    new = dataclasses.replace(
        Config(),
        seed=3,
        train=TrainConfig(steps=5),
        data=DataConfig(train_source=("a",)),
        tokenizer=TokenizerConfig(kind="bpe"),
    )
    assert configs.differences(Config(), new) == {
        "seed": (0, 3),
        "train.steps": (100_000, 5),
        "data.train_source": ((), ("a",)),
        "tokenizer.kind": ("unigram", "bpe"),
    }


def test_what_may_change_on_resume_exists_and_does_not_touch_the_arithmetic():
    """Bug: a renamed field leaves a dead entry, or a prefix lets a neighbour through."""
    fields = leaves(Config())
    allowed = {path for path in fields if path.startswith(configs.RESUMABLE)}
    for prefix in configs.RESUMABLE:
        assert any(path == prefix or path.startswith(prefix + ".") for path in fields), prefix
    arithmetic = {path for path in allowed if not path.startswith(("train.", "decode.", "mesh."))}
    # The same function: other kernels, what is kept in memory, and where encoded text is kept.
    assert arithmetic == {
        "model.attention_implementation",
        "model.layers",
        "model.remat",
        "data.cache_dir",
    }
    assert allowed.isdisjoint({"train.label_smoothing", "train.init_from"})


@pytest.mark.parametrize(
    "path", sorted((PACKAGE.parent / "configs").glob("*.py")), ids=lambda path: path.stem
)
def test_every_config_file_gives_a_config_that_is_allowed(path: Path):
    """Bug: a config file that no test trains names a field that has gone, or sizes that clash."""
    config = configs.check(load_config_file(str(path)))
    assert configs.from_json(configs.to_json(config)) == config


def test_multi30k_has_two_directions():
    """Bug: the other direction trains on the wrong side."""
    path = str(PACKAGE.parent / "configs" / "multi30k.py")
    there, back = load_config_file(f"{path}:some").data, load_config_file(f"{path}:some:de-en").data
    assert there.train_source == ("some/train.en",) == back.train_target
    assert (back.source_lang, back.target_lang) == ("de", "en")
    assert back.test_source == there.test_target == ("some/test_2016_flickr.de",)
