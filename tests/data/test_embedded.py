"""The built-in corpus: what it must hold, and what must never be in it."""

import hashlib
import importlib
import logging
import os
import re
import struct
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from transformer_jax.data import catalogues, embedded
from transformer_jax.data.catalogues import catalogue_pairs
from transformer_jax.data.cldr import cldr_pairs
from transformer_jax.data.embedded import EmbeddedSplits, embedded_splits
from transformer_jax.types import Pair

REPOSITORY = Path(__file__).resolve().parents[2]
LANGUAGES = ("de", "fr", "zh")
CLDR_TRAIN_PAIRS = 2_000

# Written apart from the package's own pattern, so that a slip there shows here.
NAMED = re.compile(r"%\(\w+\)\d*[sdif]|\$\{\w+\}|\{\w*\}|%[sdr](?![A-Za-z])|https?://[\w./-]*\w")


@pytest.fixture(scope="module", params=LANGUAGES)
def lang(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pairs(lang: str) -> list[Pair]:
    return catalogue_pairs(lang)


@pytest.fixture(scope="module")
def splits(lang: str) -> EmbeddedSplits:
    return embedded_splits(lang, cldr_train_pairs=CLDR_TRAIN_PAIRS)


def all_pairs(splits: EmbeddedSplits) -> list[Pair]:
    held_out = [*splits.valid.values(), *splits.test.values()]
    return [*splits.train, *(pair for part in held_out for pair in part)]


def sources(pairs: list[Pair]) -> set[str]:
    return {" ".join(pair.source.casefold().split()) for pair in pairs}


def digest(splits: EmbeddedSplits) -> str:
    return hashlib.sha256(repr(splits).encode()).hexdigest()


# ---- The splits ---------------------------------------------------------------------------------


def test_no_sentence_is_in_two_splits(splits: EmbeddedSplits):
    train = sources(splits.train)
    valid = sources([*splits.valid["catalogues"], *splits.valid["cldr"]])
    test = sources([*splits.test["catalogues"], *splits.test["cldr"]])
    assert not train & valid
    assert not train & test
    assert not valid & test


def test_sizes(lang: str, pairs: list[Pair], splits: EmbeddedSplits):
    assert len(pairs) > {"de": 11_000, "fr": 8_900, "zh": 8_200}[lang]
    assert len(pairs) < 15_000
    for held_out in (splits.valid, splits.test):
        assert list(held_out) == ["catalogues", "cldr"]
        assert 400 <= len(held_out["catalogues"]) <= 650
        assert len(held_out["cldr"]) == embedded.CLDR_HELD_OUT_PAIRS
    from_catalogues = len(splits.train) - CLDR_TRAIN_PAIRS
    assert 0.88 < from_catalogues / len(pairs) < 0.92


def test_held_out_has_one_translation_for_each_sentence(splits: EmbeddedSplits):
    for part in (*splits.valid.values(), *splits.test.values()):
        assert len(sources(part)) == len(part)


def test_held_out_depends_on_neither_train_size_nor_seed(lang: str, splits: EmbeddedSplits):
    other = embedded_splits(lang, cldr_train_pairs=50, seed=7)
    assert other.valid == splits.valid  # and so two calls agree
    assert other.test == splits.test
    assert other.train[:-50] == splits.train[:-CLDR_TRAIN_PAIRS]
    assert other.train[-50:] != splits.train[-CLDR_TRAIN_PAIRS:][:50]


def test_a_sentence_is_known_in_any_case_spacing_and_punctuation():
    variants = ["Given name", "GIVEN  Name", " given name:", "Given name…"]
    assert len({embedded.split_of(variant) for variant in variants}) == 1
    shares = Counter(embedded.split_of(f"sentence {n}") for n in range(20_000))
    assert shares["test"] == pytest.approx(1000, abs=120)
    assert shares["valid"] == pytest.approx(1000, abs=120)


def test_same_in_this_and_in_another_process():
    """Catches an order or a split that hangs on hash(), a set, or the file system."""
    here = embedded_splits("zh", cldr_train_pairs=500)
    program = (
        "import hashlib, sys\n"
        "from transformer_jax.data.embedded import embedded_splits\n"
        "splits = embedded_splits('zh', cldr_train_pairs=500)\n"
        "assert 'jax' not in sys.modules, 'data/ must not import jax'\n"
        "print(hashlib.sha256(repr(splits).encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == digest(here), done.stderr


# ---- Every pair ---------------------------------------------------------------------------------


def test_placeholders_are_equal(splits: EmbeddedSplits):
    for pair in all_pairs(splits):
        assert sorted(NAMED.findall(pair.source)) == sorted(NAMED.findall(pair.target)), pair


def test_lines_are_clean(splits: EmbeddedSplits):
    for pair in all_pairs(splits):
        for text in pair:
            assert text == " ".join(text.split(" ")).strip() and "  " not in text, pair
            assert all(c == " " or unicodedata.category(c)[0] not in "ZC" for c in text), pair
            assert unicodedata.is_normalized("NFC", text), pair


def test_pairs_are_translations_of_two_words_or_more(lang: str, splits: EmbeddedSplits):
    for pair in all_pairs(splits):
        assert 2 <= len(pair.source.split()) <= catalogues.MAX_WORDS, pair
        assert re.search("[A-Za-z]{2}", pair.source), pair
        if lang == "zh":
            assert re.search("[\u4e00-\u9fff]", pair.target), pair


def test_no_markup_is_left(pairs: list[Pair]):
    # "E_xit", "Exit(_X)", <b>, &nbsp;, ``literal``, :hg:`log`, context, plural, shell prompt
    markup = r"\b_[A-Z][a-z]|\(_|<(/?[abip]|br|em|code)\b|&#?\w+;|``|:hg:|\x04|\x00|\$\$"
    for pair in pairs:
        for text in pair:
            assert not re.search(markup, text), pair


def test_no_pair_is_there_twice(pairs: list[Pair]):
    assert len({(pair.source.casefold(), pair.target) for pair in pairs}) == len(pairs)


def test_drops_are_counted_by_reason(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger=catalogues.__name__):
        kept = len(catalogue_pairs("fr"))
    summary = caplog.messages[-1]
    assert f"kept {kept} pairs" in summary
    for reason in ("of one word", "untranslated", "duplicate", "with other placeholders"):
        assert re.search(rf"\d+ {reason}", summary), summary


# ---- Cleaning, message by message ---------------------------------------------------------------


CLEANED = [
    ("de", "_Edit Person", "Person b_earbeiten", [("Edit Person", "Person bearbeiten")]),
    ("zh", "_Undo %(x_y)s", "撤销(_U) %(x_y)s", [("Undo %(x_y)s", "撤销 %(x_y)s")]),
    ("de", "The index_html item", "Das index_html-Objekt", "same"),
    ("de", "Letters and @/_ only.", "Nur Buchstaben und @/_.", "same"),
    ("fr", "Your name:", "Votre\xa0nom\u202f:", [("Your name:", "Votre nom :")]),
    ("de", "Log <b>in</b> now", "Jetzt <b>anmelden</b>", [("Log in now", "Jetzt anmelden")]),
    ("de", "Use R&amp;D here", "Nutze F&amp;E hier", [("Use R&D here", "Nutze F&E hier")]),
    ("de", "A long\nline", "Eine lange\nZeile", [("A long line", "Eine lange Zeile")]),
    ("de", "- the ``R`` flag::", "- der Schalter ``R``::", [("the R flag:", "der Schalter R:")]),
    ("de", "``a(x)``\n    The top.", "``a(x)``\n    Der Gipfel.", [("The top.", "Der Gipfel.")]),
    (
        "de",
        "One way.\n\nNo way.",
        "Ein Weg.\n\nKein Weg.",
        [("One way.", "Ein Weg."), ("No way.", "Kein Weg.")],
    ),
]


@pytest.mark.parametrize(("lang", "english", "translation", "expected"), CLEANED)
def test_messages_are_cleaned(lang: str, english: str, translation: str, expected):
    dropped = Counter()
    found = list(catalogues._clean_pairs(english, translation, lang, dropped))
    assert found == ([(english, translation)] if expected == "same" else expected), dropped


DROPPED = [
    ("de", "File", "Datei", "of one word"),
    ("de", "word " * 51, "Wort " * 51, "too long"),
    ("de", "User Group", "user group", "untranslated"),
    ("zh", "Text line", "文本行 (Text line)", "untranslated"),
    ("de", "Delete %(name)s?", "%(nahme)s löschen?", "with other placeholders"),
    ("de", "Use --all here", "Hier --alle verwenden", "with other placeholders"),
    ("de", "Wait 10 seconds", "20 Sekunden warten", "with other numbers or symbols"),
    ("de", "Click <b>here</b> now", "Jetzt hier klicken", "with other HTML"),
    ("de", "Name:\t%s text\nAge:\t%s", "Name:\t%s Wort\nAlter:\t%s", "layout"),
    ("de", "  [ui]\n  name = me", "  [ui]\n  name = ich", "layout"),
    ("de", "[-p] [FILE]...", "[-p] [DATEI]...", "not prose"),
    ("de", "Sure (yn)?$$ &Yes", "Sicher (jn)?$$ &Ja", "not prose"),
    ("de", "%s: (%s)", "(%s): %s", "nothing but placeholders"),
    ("de", "Update the index after each long run of a tool", "Update", "with unlike lengths"),
    ("zh", "Import all the events from the files", "导入", "with unlike lengths"),
    ("de", "One.\n\nTwo.", "Eins und zwei.", "with other paragraphs"),
]


@pytest.mark.parametrize(("lang", "english", "translation", "reason"), DROPPED)
def test_bad_messages_are_dropped(lang: str, english: str, translation: str, reason: str):
    dropped = Counter()
    assert not list(catalogues._clean_pairs(english, translation, lang, dropped))
    assert dropped == {reason: 1}


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogue_files_are_read_in_both_byte_orders(tmp_path: Path, order: str):
    texts = [("", "Header: yes"), ("menu\x04Open it", "Öffnen"), ("a\x00b", "1\x002\x003")]
    blob, tables, start = b"", ([], []), 28 + 2 * 8 * len(texts)
    for column in (0, 1):
        for row in texts:
            raw = row[column].encode()
            tables[column].extend((len(raw), start + len(blob)))
            blob += raw + b"\x00"
    numbers = [0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0, *tables[0], *tables[1]]
    path = tmp_path / "some.mo"
    path.write_bytes(struct.pack(f"{order}{len(numbers)}I", *numbers) + blob)
    assert list(catalogues._read_mo(path)) == texts


def test_plurals_meet_plurals(pairs: list[Pair], lang: str):
    """Python's gettext would give the English singular for every form of the translation."""
    assert list(catalogues._plural_forms("a cat\x00cats", "eine\x00zwei\x00viele")) == [
        ("a cat", "eine"),
        ("cats", "viele"),
    ]
    expected = {
        "de": ("%(num)d Jahr", "%(num)d Jahre"),
        "fr": ("%(num)d année", "%(num)d années"),
        "zh": ("%(num)d 年", "%(num)d 年"),
    }
    of = {pair.source: pair.target for pair in pairs}
    assert (of["%(num)d year"], of["%(num)d years"]) == expected[lang]


@pytest.mark.parametrize("lang", sorted(catalogues.LOCALES))
def test_every_language_on_offer_is_there(lang: str):
    found = [
        package
        for package in catalogues.CATALOGUE_PACKAGES
        for path in catalogues._package_files(package, ".mo")
        if path.parent.parent.name in catalogues.LOCALES[lang]
    ]
    assert {"gramps", "Django", "plone.app.locales"} <= set(found)
    assert len(cldr_pairs(lang, 20, seed=0)) == 20


# ---- CLDR ---------------------------------------------------------------------------------------


def test_cldr_pairs_are_a_function_of_their_arguments(lang: str):
    pairs = cldr_pairs(lang, 3_000, seed=1)
    assert len(pairs) == len(sources(pairs)) == 3_000
    assert cldr_pairs(lang, 3_000, seed=1) == pairs
    assert cldr_pairs(lang, 100, seed=1) == pairs[:100]
    assert cldr_pairs(lang, 100, seed=2) != pairs[:100]
    assert cldr_pairs(lang, 0, seed=1) == []


MONTHS = (
    "January Januar February Februar March März April April May Mai June Juni July Juli August "
    "August September September October Oktober November November December Dezember"
).split()
GERMAN_MONTH: dict[str, str] = dict(zip(MONTHS[::2], MONTHS[1::2], strict=True))


def test_cldr_pairs_are_exact():
    """German dates, durations and amounts, and Chinese dates, against rules written out here."""
    checked = Counter()
    for source, target in cldr_pairs("de", 4_000, seed=0):
        if match := re.fullmatch(r"(\w+) (\d+), (\d{4})", source):
            month = GERMAN_MONTH.get(match[1], "Mai")
            if month != "Mai":  # "May" is short and long; other short names have no entry
                assert target == f"{match[2]}. {month} {match[3]}"
                checked["date"] += 1
        elif match := re.fullmatch(r"in (\d+) (second|minute|hour)s", source):
            unit = {"second": "Sekunden", "minute": "Minuten", "hour": "Stunden"}[match[2]]
            assert target == f"in {match[1]} {unit}"
            checked["duration"] += 1
        elif match := re.fullmatch(r"([\d,.]+) euros", source):
            assert target == match[1].translate(str.maketrans(",.", ".,")) + " Euro"
            checked["money"] += 1
    for source, target in cldr_pairs("zh", 4_000, seed=0):
        match = re.fullmatch(r"(\w+) (\d+), (\d{4})", source)
        if match and match[1] in GERMAN_MONTH:
            month = list(GERMAN_MONTH).index(match[1]) + 1
            assert target == f"{match[3]}年{month}月{match[2]}日"
            checked["Chinese date"] += 1
    assert min(checked[k] for k in ("date", "duration", "money", "Chinese date")) >= 15, checked


# ---- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: catalogue_pairs("xx"),
        lambda: cldr_pairs("xx", 1, 0),
        lambda: embedded_splits("xx", cldr_train_pairs=1),
    ],
)
def test_unknown_language_names_the_allowed_ones(call):
    with pytest.raises(ValueError, match=r"target_lang.*'xx'.*\bde\b.*\bfr\b.*\bzh\b") as error:
        call()
    assert "\n" not in str(error.value)


def test_missing_catalogues_name_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalogues, "CATALOGUE_PACKAGES", ("gramps", "no-such-package-1"))
    with pytest.raises(ValueError) as error:
        embedded_splits("de", cldr_train_pairs=1)
    assert str(error.value) == (
        "missing packages: no-such-package-1; "
        "run: pip install --no-deps -r requirements-quickstart.txt"
    )


def test_missing_babel_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    monkeypatch.delitem(sys.modules, "transformer_jax.data.cldr")
    with pytest.raises(ValueError) as error:
        importlib.import_module("transformer_jax.data.cldr")
    assert str(error.value) == (
        "missing packages: Babel; run: pip install --no-deps -r requirements-quickstart.txt"
    )


def test_other_versions_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setitem(catalogues.PINNED_VERSIONS, "Babel", "0.0.1")
    catalogues.require_packages(["Babel"])
    assert "not 0.0.1" in caplog.text


def test_pins_are_those_of_the_requirements_file():
    text = (REPOSITORY / "requirements-quickstart.txt").read_text(encoding="utf-8")
    assert dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)) == catalogues.PINNED_VERSIONS
    assert set(catalogues.CATALOGUE_PACKAGES) < set(catalogues.PINNED_VERSIONS)
