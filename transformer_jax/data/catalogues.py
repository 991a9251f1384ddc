"""Real parallel text out of the gettext catalogues of installed packages.

Programs that people translate ship their messages with the translations in `.mo` files. Four
packages from PyPI give some ten thousand pairs for each of a dozen languages, with no download
beyond `pip install`: labels, help texts, warnings, error messages.

A message is made for a program, not for a reader. So it is cleaned of access keys, contexts,
HTML, line breaks and typographic spaces, and then judged. Each pair that is dropped is counted
under its reason, and the counts are logged.
"""

import ast
import html
import importlib.metadata
import logging
import re
import struct
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformer_jax.config import ConfigError
from transformer_jax.types import Pair

logger = logging.getLogger(__name__)

CATALOGUE_PACKAGES = ("gramps", "plone.app.locales", "mercurial", "Django")
"""Packages with catalogues, in the order in which they are read."""

PINNED_VERSIONS = {
    "Babel": "2.19.0",
    "Django": "5.2.19",
    "gramps": "6.0.8",
    "mercurial": "7.2.4",
    "plone.app.locales": "7.0.4",
}
"""The versions behind the published held-out sets; the same as in requirements-quickstart.txt."""

INSTALL_COMMAND = "pip install --no-deps -r requirements-quickstart.txt"

LOCALES = {
    "cs": ("cs",),
    "de": ("de",),
    "es": ("es",),
    "fr": ("fr",),
    "it": ("it",),
    "ja": ("ja",),
    "nl": ("nl",),
    "pl": ("pl",),
    "pt": ("pt_BR",),
    "ru": ("ru",),
    "sv": ("sv",),
    "zh": ("zh_CN", "zh_Hans"),
}
"""Target language -> its folder names in the packages. `zh` is Chinese in simplified script."""

MAX_WORDS = 50
"""Longest English side that is kept. The few longer ones are whole help pages."""


class Rejected(Exception):
    """A message that gives no usable pair; its text is the reason, under which it is counted."""


def catalogue_pairs(target_lang: str) -> list[Pair]:
    """Returns the clean (English, `target_lang`) pairs of all packages, always in one order.

    An English sentence may come with several translations, as programs differ. A pair that
    differs from an earlier one only in the case of its English side is dropped.
    """
    require_language(target_lang)
    require_packages(CATALOGUE_PACKAGES)
    kept: dict[tuple[str, str], Pair] = {}
    dropped: Counter[str] = Counter()
    for package in CATALOGUE_PACKAGES:
        before = len(kept)
        for english, translation in _messages(package, LOCALES[target_lang], dropped):
            for pair in _clean_pairs(english, translation, target_lang, dropped):
                if kept.setdefault((pair.source.casefold(), pair.target), pair) is not pair:
                    dropped["duplicate"] += 1
        logger.info("catalogues %s: %d pairs from %s", target_lang, len(kept) - before, package)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    logger.info("catalogues %s: kept %d pairs, dropped %s", target_lang, len(kept), reasons)
    if not kept:
        raise ConfigError(f"no {target_lang!r} catalogues in the packages; run: {INSTALL_COMMAND}")
    return list(kept.values())


def require_language(target_lang: str) -> None:
    """Raises ConfigError unless there is built-in text in `target_lang`."""
    if target_lang not in LOCALES:
        allowed = ", ".join(LOCALES)
        raise ConfigError(
            f"target_lang: no built-in text in {target_lang!r}; allowed are {allowed}"
        )


def require_packages(names: Iterable[str]) -> None:
    """Raises ConfigError with the pip command if one is missing; warns of another version."""
    missing = []
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if version != PINNED_VERSIONS[name]:
            message = "%s %s is installed, not %s: the held-out sets differ from the published ones"
            logger.warning(message, name, version, PINNED_VERSIONS[name])
    if missing:
        raise ConfigError(f"missing packages: {', '.join(missing)}; run: {INSTALL_COMMAND}")


def tidy(text: str) -> str:
    """Composes characters, drops invisible ones, makes every run of white space one plain space."""
    return " ".join(_visible(text).split())  # split() knows no-break, narrow and wide spaces


def _visible(text: str) -> str:
    return _INVISIBLE.sub("", unicodedata.normalize("NFC", text))


_INVISIBLE = re.compile(r"[\xad\u200b-\u200f\u202a-\u202e\u2060\ufeff]")


# ---- Reading ------------------------------------------------------------------------------------


def _messages(
    package: str, locales: tuple[str, ...], dropped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yields (English, translation) as the program has them, without contexts.

    Plone's message ids are partly keys such as `label_log_in`: their English is looked up, and
    those that have none are dropped. Gramps marks the names of its wiki pages by their context.
    """
    is_plone = package == "plone.app.locales"
    english_of = _plone_english() if is_plone else {}
    for path in _package_files(package, ".mo"):
        if path.parent.parent.name not in locales:  # .../<locale>/LC_MESSAGES/<domain>.mo
            continue
        for key, value in _read_mo(path):
            context, _, message_id = key.rpartition("\x04")
            message_id = english_of.get(message_id, message_id)
            if context == "manual":
                dropped["wiki page name"] += 1
            elif is_plone and _PLONE_KEY.fullmatch(message_id):
                dropped["key without English"] += 1
            elif message_id:  # the empty one has the catalogue's header
                yield from _plural_forms(message_id, value)


_PLONE_KEY = re.compile(r"[A-Za-z0-9_.:-]+")


def _package_files(package: str, suffix: str) -> list[Path]:
    """The installed files of `package` with `suffix`, by pip's own record, in a stable order.

    The record also has files outside site-packages: Gramps puts its catalogues into `share/`.
    """
    files = importlib.metadata.files(package)
    if files is None:
        raise ConfigError(f"no record of the files of {package}; run: {INSTALL_COMMAND}")
    return [Path(str(file.locate())) for file in sorted(files, key=str) if file.suffix == suffix]


def _read_mo(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (id, translation) from a compiled catalogue.

    The format is in the GNU gettext manual, "The Format of GNU MO Files": a magic number that
    shows the byte order, the number of strings, and two tables of (length, offset). Python's
    gettext reads it too, but does not give out the English plural, and Babel's reader stops at
    headers without a date.
    """
    data = path.read_bytes()
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, id_table, text_table = struct.unpack_from(f"{order}3I", data, 8)

    def string(table: int, index: int) -> str:
        length, offset = struct.unpack_from(f"{order}2I", data, table + 8 * index)
        return data[offset : offset + length].decode("utf-8")

    for index in range(count):
        yield string(id_table, index), string(text_table, index)


def _plural_forms(message_id: str, value: str) -> Iterator[tuple[str, str]]:
    """Splits `singular NUL plural` and its translations.

    In all languages here gettext puts the form for one first and the form for many last.
    Chinese and Japanese have one form, which is right for both.
    """
    english, forms = message_id.split("\x00"), value.split("\x00")
    yield english[0], forms[0]
    if len(english) > 1:
        yield english[-1], forms[-1]


def _plone_english() -> dict[str, str]:
    """The English of Plone's keys: the comments `#. Default: "..."` of its template files."""
    english = {}
    for path in _package_files("plone.app.locales", ".pot"):
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            default = re.search(r'^#\. Default: "(.*)"$', block, re.MULTILINE)
            key = re.search(r'^msgid (".*"(?:\n".*")*)$', block, re.MULTILINE)
            if default and key:
                message_id = "".join(map(ast.literal_eval, key.group(1).splitlines()))
                english[message_id] = default.group(1).replace('\\"', '"')
    return english


# ---- Cleaning -----------------------------------------------------------------------------------

PLACEHOLDER = re.compile(
    r"""
      %\([\w.]+\)[-\#0+]*\d*(?:\.\d+)?[a-zA-Z]      # %(name)s
    | %[-\#0+]*\d*(?:\.\d+)?[a-zA-Z%]               # %s, %5.1f, %%
    | \$\{\w+\} | \$\w+                             # ${name}, $name
    | \{[^{}]*\}                                    # {name}
    | https?://[^\s<>"'()（），。]*[\w/]            # an address
    | (?<![\w-])(?:--[a-z][\w-]* | -[A-Za-z]\b)     # a command-line option
    """,
    re.VERBOSE,
)
"""What a program fills in or reads by the letter: it must be the same on both sides."""

_PARAGRAPH_BREAK = re.compile(r"\n\s*\n|<br\s*/?>|</?p>")

_RST_COMMAND = re.compile(r":hg:`([^`]+)`")
_RST_MARKED = re.compile(r"(``|\*\*)(?=\S)(.+?)(?<=\S)\1", re.DOTALL)

_BULLET = re.compile(r"\s*(?:[-*•]|\d+\.)\s+")
_FIELD = re.compile(r"\s*:[\w., -]+:\s+")  # :field: Description.
_TERM = re.compile(r"[^\n]+\n(?= {2,}\S)")  # term, and its indented definition below

_INLINE_TAG = re.compile(
    r"<(/?(?:a|abbr|b|big|code|em|font|i|kbd|q|small|span|strong|sub|sup|tt|u))(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_BLOCK_TAG = re.compile(r"</?(?:div|dl|dt|dd|h[1-6]|hr|img|li|meta|ol|pre|table|td|tr|ul)\b")

_NOT_WRAPPED = re.compile(
    r"""\ {2,}\S                                    # deeper than its neighbours: a table, code
      | [-*•|]\  | \d+\.\  | \.\.\                  # a list item, a directive
      | [\w.-]+\s?=(?:\s|$) | \[[\w.-]+\]$ | [$#>]\ | hg\ \w        # a setting, a shell command
      | .*\w-$                                      # a word divided at the end of the line
    """,
    re.VERBOSE,
)

_BRACKETED_KEY = re.compile(r"\s*[(（][_&][A-Z][)）]")  # 文件(_F)
_KEY = re.compile(rf"({PLACEHOLDER.pattern})|_(?=[^\W\d_])", re.VERBOSE)  # _File
_NAME = re.compile(r"(?<![A-Za-z])[a-z]{2,}_[a-z]{2,}")  # index_html


def _clean_pairs(
    english: str, translation: str, lang: str, dropped: Counter[str]
) -> Iterator[Pair]:
    """Yields the good pairs of a message, one for each paragraph, and counts the others."""
    sources = [part for part in _PARAGRAPH_BREAK.split(english) if part.strip()]
    targets = [part for part in _PARAGRAPH_BREAK.split(translation) if part.strip()]
    if len(sources) != len(targets):
        dropped["with other paragraphs"] += 1
        return
    for source, target in zip(sources, targets, strict=True):
        try:
            pair = _clean(source, target)
            _judge(pair, lang)
        except Rejected as reason:
            dropped[str(reason)] += 1
        else:
            yield pair


def _clean(source: str, target: str) -> Pair:
    """Turns a paragraph and its translation into plain text, one line each."""
    source, target = _visible(source), _visible(target)
    source, target = _without_html(source, target)
    source, target = _without_shared_head(_without_rst(source), _without_rst(target))
    source, target = _without_access_keys(_one_line(source), _one_line(target))
    return Pair(tidy(source), tidy(target))


def _without_html(source: str, target: str) -> tuple[str, str]:
    """Removes tags that only change the look, if both sides have the same; decodes entities."""
    tags = sorted(_INLINE_TAG.findall(source.lower()))
    if tags != sorted(_INLINE_TAG.findall(target.lower())):
        raise Rejected("with other HTML")
    if _BLOCK_TAG.search(source):
        raise Rejected("layout")
    return html.unescape(_INLINE_TAG.sub("", source)), html.unescape(_INLINE_TAG.sub("", target))


def _without_rst(text: str) -> str:
    """Removes Mercurial's reStructuredText: ``literal``, :hg:`command`, **strong**, and `::`."""
    text = _RST_MARKED.sub(r"\2", _RST_COMMAND.sub(r"hg \1", text))
    return re.sub(r"\s*::\s*$", ":", text)


def _without_shared_head(source: str, target: str) -> tuple[str, str]:
    """Takes off what stands untranslated before both texts: a bullet, a field, a term."""
    for head in (_BULLET, _FIELD, _TERM):
        ours, theirs = head.match(source), head.match(target)
        if ours and theirs and ours[0] == theirs[0]:
            source, target = source[ours.end() :], target[theirs.end() :]
    return source, target


def _one_line(text: str) -> str:
    """Joins wrapped lines; rejects tables, lists and code, where line breaks have a meaning."""
    first, *rest = text.strip("\n").split("\n")
    rest = textwrap.dedent("\n".join(rest)).split("\n")
    if any(_NOT_WRAPPED.match(line) for line in (first.strip(), *rest)) or "\t" in text.strip():
        raise Rejected("layout")
    return " ".join((first, *rest))


def _without_access_keys(source: str, target: str) -> tuple[str, str]:
    """Removes the mark of a menu item's access key: `_File`, `_Datei`, `文件(_F)`.

    Only a lone underscore before a letter is taken for one, and only with its match in the
    translation. Others belong to names such as `index_html`.
    """
    target, bracketed = _BRACKETED_KEY.subn("", target)
    if _access_keys(source) != 1:
        return source, target
    shares_name = set(_NAME.findall(source)) & set(_NAME.findall(target))
    if bracketed or (_access_keys(target) == 1 and not shares_name):
        source = _KEY.sub(lambda m: m[1] or "", source)
        target = target if bracketed else _KEY.sub(lambda m: m[1] or "", target)
    return source, target


def _access_keys(text: str) -> int:
    return sum(1 for match in _KEY.finditer(text) if match[0] == "_")


# ---- Judging ------------------------------------------------------------------------------------

_NOT_PROSE = re.compile(
    r"""
      \$\$ | [=~-]{3,} | ^[-*•]\s | ^[:$]\w    # escapes, prompts, rules, lists, fields
    | \[- | \]\.\.\. | \|[A-Z] | \b(?:gramps|hg)\ - | &[a-z]\b      # command lines
    | %\(\w*(?:html|_start|_strt|_end)\w*\)         # markup in a placeholder
    """,
    re.VERBOSE,
)
_LEFTOVER = re.compile(r"\\|``|:hg:|</|[\u3400-\u9fff]['’]s\b")  # of escapes, markup, English
_SYMBOL = re.compile(r"\d+|[=<>{}|*`$\#^~_]")
_WORD = re.compile(r"[A-Za-z]{2}")
_HAN_OR_KANA = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")


def _judge(pair: Pair, lang: str) -> None:
    """Raises Rejected with the reason, unless the pair is a phrase and its whole translation.

    The rules are cheap signs of three faults: nobody translated it; it is no language but a
    synopsis or a setting; one side says more than the other.
    """
    source, target = pair
    words = len(source.split())
    if words < 2:
        raise Rejected("of one word")
    if words > MAX_WORDS:
        raise Rejected("too long")
    if not target or source.casefold() in target.casefold():
        raise Rejected("untranslated")
    if _NOT_PROSE.search(source) or _LEFTOVER.search(f"{source}\n{target}"):
        raise Rejected("not prose")
    if sorted(PLACEHOLDER.findall(source)) != sorted(PLACEHOLDER.findall(target)):
        raise Rejected("with other placeholders")
    plain = Pair(PLACEHOLDER.sub(" ", source), PLACEHOLDER.sub(" ", target))
    if sorted(_SYMBOL.findall(plain.source)) != sorted(_SYMBOL.findall(plain.target)):
        raise Rejected("with other numbers or symbols")
    if not _WORD.search(plain.source):
        raise Rejected("nothing but placeholders")
    if not _lengths_agree(plain, lang):
        raise Rejected("with unlike lengths")


def _lengths_agree(plain: Pair, lang: str) -> bool:
    """Whether the two sides, without placeholders, may say the same.

    Chinese and Japanese are counted in characters for each English word. For the others the
    lengths in characters may differ by a factor of 2, after ten more on each side: labels of few
    letters differ by more.
    """
    if lang in ("ja", "zh"):
        words = sum(1 for word in plain.source.split() if _WORD.search(word))
        characters = len(_HAN_OR_KANA.findall(plain.target))
        return 0.5 <= characters / words <= (5 if lang == "zh" else 9)
    source, target = (len(tidy(side)) + 10 for side in plain)
    return 0.5 <= target / source <= 2
