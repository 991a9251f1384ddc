"""The configuration of a run: one frozen tree, each field with its meaning, saved with the run.

Nothing outside this file holds a default for a value that is a field here. Unknown keys, wrong
types and impossible combinations are errors of one line that name the field.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FORMAT_VERSION = 1


class ConfigError(ValueError):
    """A user's mistake, said in one line: which field, what was got, what is allowed."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The Transformer of section 3 of the paper; the defaults are its base model."""

    vocab_size: int = 0
    """Rows of the embedding table; 0: taken from the tokenizer."""
    source_vocab_size: int = 0
    """Rows of the source table where the two sides have their own pieces; 0: vocab_size."""
    d_model: int = 512
    """Width of the residual stream."""
    d_ff: int = 2048
    """Width inside the feed-forward sublayer."""
    num_heads: int = 8
    """Attention heads h."""
    num_kv_heads: int = 0
    """Key and value heads, shared by groups of heads (1: multi-query); 0: num_heads."""
    d_k: int = 0
    """Query and key width of each head; 0: d_model / num_heads."""
    d_v: int = 0
    """Value width of each head; 0: d_model / num_heads."""
    encoder_layers: int = 6
    """Encoder depth; 0: no encoder, a decoder-only language model."""
    decoder_layers: int = 6
    """Decoder depth."""
    norm_position: Literal["post", "pre"] = "post"
    """post: LayerNorm(x + Sublayer(x)), the paper; pre: x + Sublayer(LayerNorm(x)), final norm."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    norm_epsilon: float = 1e-6
    """Added to the variance."""
    activation: Literal["relu", "gelu", "silu", "swiglu", "geglu"] = "relu"
    """Feed-forward activation; swiglu and geglu add a gate of the same width."""
    attention: Literal["softmax", "linear"] = "softmax"
    """Self-attention; linear: the kernelised one, in time linear in the length."""
    attention_window: int = 0
    """Self-attention sees only positions less than this away (sparse attention); 0: all."""
    attention_implementation: Literal["auto", "plain", "blockwise", "cudnn", "tpu"] = "auto"
    """How softmax attention is computed; the result is the same."""
    layers: Literal["auto", "unrolled", "scanned"] = "auto"
    """How a stack is compiled for training; auto: scanned on TPU, unrolled elsewhere."""
    remat: Literal["none", "dots", "full"] = "none"
    """Activations computed again in the backward pass: none, all but matmuls, or whole layers."""
    attention_bias: bool = False
    """Biases on the four attention projections."""
    ff_bias: bool = True
    """Biases in the feed-forward sublayer."""
    logits_bias: bool = False
    """A bias for each token of the vocabulary."""
    positions: Literal["sinusoidal", "learned", "rotary", "relative", "none"] = "sinusoidal"
    """How order is told; relative: the bias of T5."""
    sinusoid_order: Literal["interleaved", "concatenated"] = "interleaved"
    """interleaved: sin, cos, sin, ... as in the paper; concatenated: all sines first."""
    sinusoid_exponent: Literal["2i/d", "i/(d/2-1)"] = "2i/d"
    """Frequency i is 10000 to the minus this; the authors' code has the second."""
    position_offset: int = 0
    """Number of the first position; M2M100 and NLLB count from 2."""
    max_positions: int = 512
    """learned: rows of the position tables, and so the longest sequence."""
    rotary_base: float = 10_000.0
    """rotary: frequencies are this to the power -2i / d_k."""
    relative_buckets: int = 32
    """relative: distances are told apart by so many learned numbers for each head."""
    relative_max_distance: int = 128
    """relative: all distances from here on are alike."""
    tied_embeddings: Literal["all", "decoder", "none"] = "all"
    """all: source, target and output share one table; decoder: target and output do."""
    embedding_scale: bool = True
    """Multiply embeddings by sqrt(d_model)."""
    init: Literal["paper", "depth_scaled"] = "paper"
    """paper: Glorot; depth_scaled: layer l divided by sqrt(l), for deep post-norm stacks."""
    dropout: float = 0.1
    """P_drop on the output of each sublayer."""
    embedding_dropout: float = 0.1
    """Dropout on the sums of embeddings and positions."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights (the paper's first code: none)."""
    activation_dropout: float = 0.0
    """Dropout after the feed-forward activation (the paper's first code: none)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations. Parameters, softmax, norm statistics and the loss are float32."""


@dataclass(frozen=True)
class TokenizerConfig:
    """SentencePiece, trained once on the training text and saved with the run."""

    vocab_size: int = 32000
    """Number of pieces, special ids included."""
    kind: Literal["unigram", "bpe"] = "unigram"
    """Segmentation model."""
    byte_fallback: bool = True
    """Write unknown characters as bytes, so that nothing becomes <unk>."""
    split_digits: bool = False
    """One piece for each digit: numbers are copied digit by digit."""
    normalization: Literal["nmt_nfkc", "nfkc", "identity"] = "nmt_nfkc"
    """SentencePiece's normalisation rule; identity keeps every character."""
    model: str = ""
    """An existing SentencePiece model (.model) to use instead of training one; special ids other
    than ours are numbered anew."""
    target_model: str = ""
    """An existing model of the target side, where --tokenizer.model is that of the source alone."""
    separate: bool = False
    """One model for each side instead of one for both; needs --model.tied-embeddings decoder or
    none."""
    sample_lines: int = 2_000_000
    """Training reads at most this many lines of each side, evenly spread."""


@dataclass(frozen=True)
class DataConfig:
    """Where sentence pairs come from and how they become batches."""

    source: Literal["text", "tfds", "embedded"] = "text"
    """text: parallel text files; tfds: a TensorFlow Datasets name; embedded: pip catalogues."""
    source_lang: str = "en"
    """Source language; for tfds also the name of the feature."""
    target_lang: str = "de"
    """Target language; chooses sacreBLEU's tokenizer."""
    train_source: tuple[str, ...] = ()
    """text: training files or patterns such as "*.en.gz" (.gz .bz2 .xz .zst are unpacked), source
    side, one sentence a line; a .tsv holds both sides in two columns."""
    train_target: tuple[str, ...] = ()
    """text: training files, target side, line by line beside the source; none for a .tsv."""
    train_weights: tuple[float, ...] = ()
    """text: share of each training file or pattern in an epoch; none: as temperature says."""
    train_temperature: float = 1.0
    """text: shares are sizes to the power 1 / this; 1: each pair once an epoch, more: small files
    are repeated."""
    train_target_langs: tuple[str, ...] = ()
    """text: target language of each training file or pattern; the source then begins with a tag
    for it. None: all are in target_lang, without a tag."""
    valid_source: tuple[str, ...] = ()
    """text: validation files, source side."""
    valid_target: tuple[str, ...] = ()
    """text: validation files, target side."""
    test_source: tuple[str, ...] = ()
    """text: test files, source side; scored once when training ends."""
    test_target: tuple[str, ...] = ()
    """text: test files, target side."""
    tfds_name: str = ""
    """tfds: builder and config, such as wmt14_translate/de-en."""
    tfds_dir: str = ""
    """tfds: data directory; empty: the default of TFDS."""
    tfds_train_split: str = "train"
    """tfds: split to train on."""
    tfds_valid_split: str = "validation"
    """tfds: split to validate on."""
    tfds_test_split: str = "test"
    """tfds: split to test on; empty: none."""
    cldr_train_pairs: int = 20_000
    """embedded: number of generated date, unit, currency and list pairs."""
    max_source_tokens: int = 256
    """Training pairs with more source tokens, EOS included, are dropped and counted."""
    max_target_tokens: int = 256
    """Training pairs with more target tokens, EOS included, are dropped and counted."""
    max_length_ratio: float = 0.0
    """Training pairs with so many times more tokens on one side are dropped; 0: none are."""
    drop_identical: bool = False
    """Drop training pairs with the same text on both sides."""
    drop_duplicates: bool = False
    """Drop training pairs whose tokens are those of an earlier pair."""
    subword_sampling: float = 0.0
    """Draw the pieces of each training text anew in each epoch: for a unigram tokenizer the
    smoothing alpha (0.1 to 0.5), for bpe the probability to drop a merge (0.1); 0: never."""
    global_batch_tokens: int = 25_000
    """Slots a batch may hold on each side, padding included, over all devices."""
    batching: Literal["bucketed", "packed"] = "bucketed"
    """bucketed: several shapes with rows as short as the pairs; packed: one shape of long rows."""
    num_buckets: int = 8
    """bucketed: at most so many shapes; their edges are chosen from the lengths of the data."""
    pairs_per_row: int = 0
    """Pairs that may share a row, side by side and without seeing each other; 0: all that fit."""
    packed_length: int = 0
    """packed: slots of a row, of the longer side; 0: the longest pair that is allowed, and at
    least four average ones."""
    row_multiple: int = 8
    """Rows of a batch are a multiple of this where so many fit: the number of devices, or a
    multiple of it, so that no row is filler."""
    cache_dir: str = ""
    """Where encoded text is kept; empty: transformer_jax/encoded in the user's cache directory."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Section 5.3 of the paper."""

    name: Literal["adam", "adamw", "adafactor", "lion", "muon"] = "adam"
    """Optax optimizer."""
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    """All but adam."""
    schedule: Literal["noam", "rsqrt", "cosine", "wsd", "constant"] = "noam"
    """noam: factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5); rsqrt: the same curve by
    its peak; cosine: to 0; wsd: constant, then a line to 0."""
    learning_rate: float = 1.0
    """noam: the factor; otherwise the peak learning rate."""
    warmup_steps: int = 4000
    """Linear warm-up."""
    decay_share: float = 0.1
    """wsd: last share of the steps, in which the rate falls."""
    clip_norm: float = 0.0
    """Clip the global gradient norm to this; 0: never."""


@dataclass(frozen=True)
class TrainConfig:
    """How long, how often, and what is optimised."""

    steps: int = 100_000
    """Optimizer updates."""
    micro_batches: int = 1
    """Parts into which each batch is cut; one at a time is in memory. The result is the same."""
    label_smoothing: float = 0.1
    """Probability mass moved from the reference token to all others, evenly."""
    eval_every_steps: int = 2500
    """Validation loss and BLEU; also at the last step. 0: only at the last step."""
    eval_bleu_sentences: int = 500
    """Validation sentences translated for BLEU at each evaluation; 0: loss only."""
    checkpoint_every_steps: int = 1000
    """Save the whole state; also at evaluations, at the end and on a signal. 0: only then."""
    keep_checkpoints: int = 5
    """Latest checkpoints kept."""
    keep_best: int = 1
    """Best checkpoints kept besides."""
    best_metric: Literal["bleu", "loss"] = "loss"
    """What best means: highest validation BLEU or lowest validation loss."""
    keep_every_steps: int = 0
    """Checkpoints of every so many steps stay for ever; 0: none."""
    average_last: int = 0
    """When a run is done, average so many of its last checkpoints (of those that are kept), score
    that, and keep it as "average"; 0: none. The paper takes 5 for base and 20 for big models."""
    patience: int = 0
    """Stop after so many evaluations in a row without a new best; 0: never."""
    ema_decay: float = 0.0
    """Average the parameters, old ones weighted by this at each step; the average is what is
    evaluated and what a checkpoint gives. 0: the parameters themselves."""
    log_every_steps: int = 50
    """Lines in metrics.jsonl and TensorBoard."""
    init_from: str = ""
    """Run directory whose model, parameters and tokenizer this run starts from."""


@dataclass(frozen=True)
class DecodeConfig:
    """Section 6.1 of the paper; used for validation BLEU and as the defaults of Translator."""

    beam_size: int = 4
    """Hypotheses kept for each sentence; 1: greedy."""
    length_penalty: float = 0.6
    """alpha in ((5 + length) / 6) ** alpha."""
    length_penalty_form: Literal["paper", "power"] = "paper"
    """paper: the above; power: length ** alpha, as in transformers and CTranslate2."""
    rule: Literal["exact", "authors", "ctranslate2", "transformers"] = "exact"
    """Which continuations count and when a search ends: decode/search.py defines them."""
    max_extra_tokens: int = 50
    """A translation may be this much longer than its source, in tokens."""
    batch_tokens: int = 4096
    """Source slots in one decode batch."""


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh; one may be -1: all remaining devices."""

    data: int = -1
    fsdp: int = 1
    model: int = 1


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0
    """Initial parameters, data order and dropout all follow from it."""
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


# Fields that may differ when a run goes on: they change when things happen, not what is computed.
RESUMABLE = (
    "train.steps",
    "train.eval_every_steps",
    "train.eval_bleu_sentences",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.keep_best",
    "train.best_metric",
    "train.keep_every_steps",
    "train.average_last",
    "train.patience",
    "train.micro_batches",
    "train.log_every_steps",
    "model.attention_implementation",
    "model.layers",
    "model.remat",
    "data.cache_dir",
    "decode",
    "mesh",
)


_POSITIVE = {
    "model": "d_model d_ff num_heads decoder_layers norm_epsilon max_positions rotary_base "
    "relative_max_distance",
    "optimizer": "epsilon",
    "tokenizer": "vocab_size sample_lines",
    "data": "max_source_tokens max_target_tokens global_batch_tokens num_buckets row_multiple "
    "train_temperature",
    "train": "steps micro_batches log_every_steps keep_checkpoints",
    "decode": "beam_size batch_tokens",
}
_NOT_NEGATIVE = {
    "model": "vocab_size source_vocab_size encoder_layers d_k d_v num_kv_heads "
    "attention_window position_offset",
    "data": "cldr_train_pairs max_length_ratio pairs_per_row packed_length",
    "train": "eval_every_steps eval_bleu_sentences checkpoint_every_steps keep_best "
    "keep_every_steps patience average_last",
    "optimizer": "learning_rate warmup_steps clip_norm weight_decay",
    "decode": "max_extra_tokens",
}
_BELOW_ONE = {
    "model": "dropout embedding_dropout attention_dropout activation_dropout",
    "optimizer": "b1 b2",
    "data": "subword_sampling",
    "train": "label_smoothing ema_decay",
}


_TWO_LETTERS = {
    **dict.fromkeys(("zho", "chi", "cmn", "yue", "lzh", "wuu", "nan"), "zh"),
    **{"jpn": "ja", "kor": "ko", "tha": "th", "lao": "lo", "khm": "km", "mya": "my", "bur": "my"},
}


def base_language(code: str) -> str:
    """The language of zh-CN, zh_Hans, cmn_Hant or jpn_Jpan: zh, zh, zh, ja.

    Three letters become two where scores and spaces depend on the language; others stay.
    """
    language = code.lower().replace("_", "-").partition("-")[0]
    return _TWO_LETTERS.get(language, language)


def flag(path: str) -> str:
    """The command line's spelling of a field: train.log_every_steps -> --train.log-every-steps."""
    return "--" + path.replace("_", "-")


def check(config: Config) -> Config:
    """Refuse sizes that cannot work, before anything is read or compiled."""
    model, data = config.model, config.data

    def value_of(path: str) -> Any:
        return functools.reduce(getattr, path.split("."), config)

    def require(condition: bool, path: str, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{flag(path)}: got {value_of(path)!r}, allowed: {allowed}")

    for section in dataclasses.fields(config):
        tree = value_of(section.name)
        for item in dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else ():
            path = f"{section.name}.{item.name}"
            value = value_of(path)
            require(not isinstance(value, float) or math.isfinite(value), path, "a finite number")
    require(0 <= config.seed < 2**31, "seed", f"0 to {2**31 - 1}")
    for path in _paths(_POSITIVE):
        require(value_of(path) > 0, path, "a positive number")
    for path in _paths(_NOT_NEGATIVE):
        require(value_of(path) >= 0, path, "0 or more")
    for path in _paths(_BELOW_ONE):
        require(0 <= value_of(path) < 1, path, "0 up to, not including, 1")
    require(0 < config.optimizer.decay_share <= 1, "optimizer.decay_share", "above 0, up to 1")
    require(
        config.train.average_last <= config.train.keep_checkpoints,
        "train.average_last",
        f"up to --train.keep-checkpoints ({config.train.keep_checkpoints})",
    )
    if config.train.best_metric == "bleu" and config.train.patience:
        some = config.train.eval_bleu_sentences > 0 and model.encoder_layers > 0
        require(
            some, "train.patience", "0, or --train.best-metric loss, since BLEU is not measured"
        )
    if not (model.d_k and model.d_v):
        require(
            model.d_model % model.num_heads == 0,
            "model.num_heads",
            f"a divisor of --model.d-model ({model.d_model}), or set --model.d-k and --model.d-v",
        )
    if model.tied_embeddings == "all":
        same = model.source_vocab_size in (0, model.vocab_size)
        require(same, "model.source_vocab_size", "0, since all embeddings share one table")
    _check_attention(model, require)
    if model.positions == "learned":
        longest = max(data.max_source_tokens, data.max_target_tokens)
        enough = f"at least {longest}, the longest training sequence (learned positions)"
        require(model.max_positions >= longest, "model.max_positions", enough)
    for side, longest in (("source", data.max_source_tokens), ("target", data.max_target_tokens)):
        require(
            data.global_batch_tokens >= longest,
            "data.global_batch_tokens",
            f"at least --data.max-{side}-tokens ({longest}), so that one such pair fits",
        )
    weights = [w for w in data.train_weights if not (w > 0 and math.isfinite(w))]
    require(not weights, "data.train_weights", "positive numbers")
    require(
        not data.packed_length or data.packed_length <= data.global_batch_tokens,
        "data.packed_length",
        f"at most --data.global-batch-tokens ({data.global_batch_tokens})",
    )
    ratio = data.max_length_ratio
    require(ratio == 0 or ratio >= 1, "data.max_length_ratio", "0, or 1 or more")
    tokenizer = config.tokenizer
    require(bool(tokenizer.model or not tokenizer.target_model), "tokenizer.model", "a file")
    two = tokenizer.separate or bool(tokenizer.target_model)
    allowed = "decoder or none, since each side has its own pieces"
    require(not two or model.tied_embeddings != "all", "model.tied_embeddings", allowed)
    sizes = dataclasses.asdict(config.mesh)
    for name, size in sizes.items():
        require(size == -1 or size > 0, f"mesh.{name}", "a positive number, or -1 for the rest")
    if list(sizes.values()).count(-1) > 1:
        raise ConfigError(f"--mesh: got {sizes}, allowed: -1 for one axis only")
    return config


def _check_attention(model: ModelConfig, require: Callable[[bool, str, str], None]) -> None:
    """Sizes that the kind of positions and of attention ask for."""
    heads, key_heads = model.num_heads, model.num_kv_heads or model.num_heads
    require(heads % key_heads == 0, "model.num_kv_heads", f"a divisor of {heads}, the heads")
    if model.positions == "sinusoidal":
        require(model.d_model % 2 == 0, "model.d_model", "an even number (sinusoidal positions)")
    width = model.d_k or model.d_model // heads
    if model.positions == "rotary":
        field = "model.d_k" if model.d_k else "model.d_model"
        require(width % 2 == 0, field, f"an even d_k (rotary positions), not {width}")
    if model.positions == "relative":
        require(
            model.relative_buckets >= 4 and model.relative_buckets % 4 == 0,
            "model.relative_buckets",
            "a multiple of 4",
        )
        far = model.relative_max_distance > model.relative_buckets // 2
        require(far, "model.relative_max_distance", f"more than {model.relative_buckets // 2}")
    if model.attention == "linear":
        require(model.attention_window == 0, "model.attention_window", "0 with linear attention")
        require(model.positions != "relative", "model.positions", "not relative, with linear")
        none = model.attention_dropout == 0
        require(none, "model.attention_dropout", "0 with linear attention, which has no weights")


def _paths(names: dict[str, str]) -> list[str]:
    return [f"{section}.{name}" for section, some in names.items() for name in some.split()]


def to_json(config: Config) -> str:
    """The text of config.json: every field, and the version of this format."""
    tree = {"format_version": FORMAT_VERSION, **dataclasses.asdict(config)}
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str, where: str = "config.json") -> Config:
    """Read what to_json wrote. Unknown keys and wrong types are errors; absent keys take defaults.

    Raises:
        ConfigError: names the file and the field.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}: not JSON ({error.msg})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: got {type(tree).__name__}, allowed: an object")
    version = tree.pop("format_version", None)
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ConfigError(
            f"{where}: format_version: got {version!r}, allowed: 1 to {FORMAT_VERSION}"
        )
    return check(_build(Config, tree, where, ""))


def load(path: Path) -> Config:
    """The Config saved in a run directory's config.json."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: no such file, so this is not a run directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return from_json(text, str(path))


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ: dotted name -> (old, new)."""
    found: dict[str, tuple[Any, Any]] = {}
    for item in dataclasses.fields(old):
        path, a, b = prefix + item.name, getattr(old, item.name), getattr(new, item.name)
        if dataclasses.is_dataclass(a):
            found |= differences(a, b, path + ".")
        elif a != b:
            found[path] = (a, b)
    return found


def _build(cls: type, tree: dict[str, Any], where: str, prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(tree) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown field {prefix + unknown[0]!r}")
    return cls(**{k: _value(hints[k], v, where, prefix + k) for k, v in tree.items()})


def _value(hint: Any, value: Any, where: str, path: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(typing.cast(type, hint), value, where, path + ".")
    if origin is Literal:
        if value in typing.get_args(hint):
            return value
    elif origin is tuple and isinstance(value, list):
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, v, where, path) for v in value)
    elif origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _value(typing.get_args(hint)[0], value, where, path)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    allowed = typing.get_args(hint) if origin is Literal else getattr(hint, "__name__", hint)
    raise ConfigError(f"{where}: {path}: got {value!r}, allowed: {allowed}")
