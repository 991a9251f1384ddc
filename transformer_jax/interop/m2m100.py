"""M2M100 and NLLB-200 models in, as directories of transformers' M2M100ForConditionalGeneration.

Pre-norm with final norms, positions that count from 2, one SentencePiece model for both sides, and
a token for each language: first in the source, and forced as the first of the target.
"""

import re
from pathlib import Path
from typing import Any

from transformer_jax.config import Config, ConfigError, DataConfig
from transformer_jax.data.tokenizer import Pieces, Tokenizer
from transformer_jax.interop import bart
from transformer_jax.interop.directory import read_file, read_json
from transformer_jax.interop.tensors import read_tensors
from transformer_jax.interop.weights import write_run

_SENTENCEPIECE = "sentencepiece.bpe.model"
# Ids of the special tokens, in this order, whatever SentencePiece calls them.
_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
# The languages that follow the pieces of vocab.json where no file lists them: transformers knows
# them by the word "language_codes" in tokenizer_config.json.
_LANGUAGES = {
    "m2m100": """af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga
        gd gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk
        ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th
        tl tn tr uk ur uz vi wo xh yi yo zh zu""".split(),
    "wmt21": "en ha is ja cs ru zh de".split(),
}


def import_m2m100(source: Path, output: Path) -> None:
    """A run directory of an M2M100 or NLLB-200 directory.

    Raises:
        ConfigError: something is missing, damaged, or cannot be carried over; nothing is written.
    """
    settings = bart.read_settings(source, "m2m_100")
    tied = settings.require("tie_word_embeddings", True, True, False)
    model = bart.model_config(
        settings,
        vocab_size=settings.number("vocab_size"),
        norm_position="pre",
        sinusoid_exponent="i/(d/2-1)",
        position_offset=2,
        tied_embeddings="all" if tied else "none",
    )
    tokenizer = _read_tokenizer(settings, model.vocab_size)
    params = bart.params_from(read_tensors(source), model, str(source))
    longest = settings.number("max_position_embeddings", 1024)
    data = DataConfig(
        source_lang=_default_language(settings, tokenizer, "src_lang"),
        target_lang=_default_language(settings, tokenizer, "tgt_lang"),
        max_source_tokens=longest,
        max_target_tokens=longest,
    )
    decode = bart.decode_config(settings)
    write_run(output, params, Config(model=model, data=data, decode=decode), tokenizer)


def _default_language(settings: bart.Settings, tokenizer: Tokenizer, name: str) -> str:
    """The language that the tokenizer was saved with; any where it was none."""
    lang = settings.tokenizer.get(name)
    return lang if isinstance(lang, str) and lang in tokenizer.tags else "und"


def _read_tokenizer(settings: bart.Settings, rows: int) -> Tokenizer:
    where = settings.where
    content = read_file(where / _SENTENCEPIECE)
    try:
        own = Pieces(content)
    except RuntimeError:
        raise ConfigError(f"{where / _SENTENCEPIECE}: not a SentencePiece model") from None
    path = where / "vocab.json"
    if path.exists():
        vocabulary = read_json(path)
        tags = _m2m100_languages(settings, len(vocabulary))
    else:
        path = where / _SENTENCEPIECE
        # NLLB: the special tokens take other ids than in SentencePiece, so all are one higher.
        pieces = [own.piece(i) for i in range(3, own.size)]
        vocabulary = {piece: i for i, piece in enumerate([*_FIRST, *pieces])}
        tags = _nllb_languages(settings, len(vocabulary))
    for piece, number in tags.items():
        if vocabulary.setdefault(piece, number) != number:
            raise ConfigError(
                f"{path}: {piece!r}: got {vocabulary[piece]}, allowed: {number}, the language's id"
            )
    names = bart.numbering(path, vocabulary, rows)
    others = [vocabulary[t] for t in ("<s>", "<mask>") if t in vocabulary]
    special = bart.special_ids(settings, vocabulary, rows, [*others, *bart.without_piece(names)])
    languages = {tag.strip("_"): number for tag, number in tags.items()}
    pieces = Pieces(content, names, special.unk, special.all | set(languages.values()))
    return Tokenizer(pieces, pieces, languages, "both", special)


def _m2m100_languages(settings: bart.Settings, first: int) -> dict[str, int]:
    """Token and id of each language, such as __de__, behind the pieces."""
    listed = [t for t in _special_tokens(settings) if re.fullmatch(r"__\w+__", t)]
    if not listed:
        kind = settings.tokenizer.get("language_codes", "m2m100")
        if kind not in _LANGUAGES:
            allowed = " or ".join(_LANGUAGES)
            raise ConfigError(
                f"{settings.where / 'tokenizer_config.json'}: language_codes: got {kind!r}, "
                f"allowed: {allowed}"
            )
        listed = [f"__{code}__" for code in _LANGUAGES[kind]]
    return {token: first + i for i, token in enumerate(listed)}


def _nllb_languages(settings: bart.Settings, first: int) -> dict[str, int]:
    """Token and id of each language, such as deu_Latn: as tokenizer.json says, else in order."""
    code = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
    added = read_json(settings.where / "tokenizer.json", optional=True).get("added_tokens", [])
    found = {}
    for entry in added if isinstance(added, list) else []:
        token = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(token, str) and code.fullmatch(token):
            found[token] = entry.get("id")
    if found:
        return found
    listed = [token for token in _special_tokens(settings) if code.fullmatch(token)]
    if not listed:
        raise ConfigError(
            f"{settings.where}: got no list of languages, allowed: tokenizer.json, or "
            "additional_special_tokens in special_tokens_map.json or tokenizer_config.json"
        )
    return {token: first + i for i, token in enumerate(listed)}


def _special_tokens(settings: bart.Settings) -> list[str]:
    """The additional special tokens of whichever file lists them, in order."""
    known = read_json(settings.where / "special_tokens_map.json", optional=True)
    for tree in (known, settings.tokenizer):
        for name in ("additional_special_tokens", "extra_special_tokens"):
            tokens: Any = tree.get(name)
            if isinstance(tokens, list) and tokens:
                return [t["content"] if isinstance(t, dict) else str(t) for t in tokens]
    return []
