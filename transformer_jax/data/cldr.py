"""Exact parallel text without end, generated from Unicode's CLDR tables as Babel ships them.

The tables say how each language writes dates, times, durations, measures, amounts of money and
lists, and what it calls countries and languages. Writing one value in English and in the target
language gives a translation that is right by construction, so these pairs teach and test what a
small corpus cannot: numbers, names, and the order of words around them.
"""

import datetime
import itertools
import random
from collections.abc import Callable, Iterator

from transformer_jax.config import ConfigError
from transformer_jax.data.catalogues import (
    INSTALL_COMMAND,
    require_language,
    require_packages,
    tidy,
)
from transformer_jax.types import Pair

try:
    from babel import Locale, dates, lists, numbers, units
except ModuleNotFoundError as error:
    raise ConfigError(f"missing packages: Babel; run: {INSTALL_COMMAND}") from error

UNITS = (
    "length-kilometer length-meter length-centimeter length-mile mass-kilogram mass-gram "
    "mass-tonne volume-liter speed-kilometer-per-hour temperature-celsius digital-megabyte "
    "area-hectare area-square-kilometer energy-kilowatt-hour power-watt angle-degree"
).split()
CURRENCIES = "USD EUR CNY JPY GBP CHF INR BRL CAD SEK KRW MXN RUB AUD".split()

_NO_COUNTRY = {"EZ", "QO", "UN", "XA", "XB", "ZZ"}
"""Two-letter codes that name no country: the euro area, pseudo-accents, "unknown region", ..."""
_NO_LANGUAGE = {"mul", "root", "und", "zxx"}

_SECONDS = (1, 60, 3600, 86_400, 604_800, 2_629_800, 31_557_600)  # ... day, week, month, year

Writer = Callable[[Locale], str]
"""Writes one value, already chosen, as a given language does."""


def cldr_pairs(target_lang: str, count: int, seed: int) -> list[Pair]:
    """Returns `count` pairs with distinct English sides: the first ones of `cldr_stream`."""
    return list(itertools.islice(cldr_stream(target_lang, seed), count))


def cldr_stream(target_lang: str, seed: int) -> Iterator[Pair]:
    """Returns an endless stream of pairs: a function of its arguments and the version of Babel.

    An English text that came before, in whatever case, is drawn again. This drops above all the
    short ones, such as "in 2 hours", so that a stream's pairs grow longer as they run out.
    """
    require_language(target_lang)
    require_packages(["Babel"])
    return _stream(Locale("en"), Locale.parse(_LOCALES.get(target_lang, target_lang)), seed)


_LOCALES = {"pt": "pt_BR", "zh": "zh_Hans"}


def _stream(english: Locale, target: Locale, seed: int) -> Iterator[Pair]:
    draws = _draws(english, target)
    rng = random.Random(seed)
    seen: set[str] = set()
    while True:
        write = rng.choice(draws)(rng)
        source = tidy(write(english))
        if source.casefold() not in seen:
            seen.add(source.casefold())
            yield Pair(source, tidy(write(target)))


def _draws(english: Locale, target: Locale) -> list[Callable[[random.Random], Writer]]:
    """One entry for each share of the stream; lists of countries have two."""
    countries = sorted(
        code
        for code in english.territories.keys() & target.territories.keys()
        if len(code) == 2 and code not in _NO_COUNTRY
    )
    languages = sorted((english.languages.keys() & target.languages.keys()) - _NO_LANGUAGE)
    return [
        _date,
        _datetime,
        _duration,
        _measure,
        _money,
        _interval,
        lambda rng: _country_list(rng, countries),
        lambda rng: _country_list(rng, countries),
        lambda rng: _language_list(rng, languages),
    ]


def _day(rng: random.Random, first_year: int, last_year: int) -> datetime.date:
    first = datetime.date(first_year, 1, 1).toordinal()
    return datetime.date.fromordinal(
        rng.randint(first, datetime.date(last_year, 12, 31).toordinal())
    )


def _date(rng: random.Random) -> Writer:
    """Thursday, April 3, 2025."""
    day, style = _day(rng, 1900, 2099), rng.choice(("full", "long", "medium"))
    return lambda locale: dates.format_date(day, style, locale=locale)


def _datetime(rng: random.Random) -> Writer:
    """April 3, 2025 at 5:04:09 PM UTC."""
    time = datetime.time(rng.randrange(24), rng.randrange(60), rng.randrange(60))
    moment = datetime.datetime.combine(_day(rng, 1950, 2050), time)
    style = rng.choice(("long", "medium"))
    return lambda locale: dates.format_datetime(moment, style, tzinfo=dates.UTC, locale=locale)


def _duration(rng: random.Random) -> Writer:
    """12 minutes; in 12 minutes; 12 minutes ago."""
    seconds = rng.choice(_SECONDS) * rng.randint(1, 59) * rng.choice((1, -1))
    span, relative = datetime.timedelta(seconds=seconds), rng.random() < 0.6
    return lambda locale: dates.format_timedelta(span, add_direction=relative, locale=locale)


def _measure(rng: random.Random) -> Writer:
    """12.5 kilometers per hour."""
    unit = rng.choice(UNITS)
    value = rng.choice((rng.randint(1, 999), round(rng.uniform(0, 99), 1)))
    return lambda locale: units.format_unit(value, unit, length="long", locale=locale)


def _money(rng: random.Random) -> Writer:
    """1,234.50 Swiss francs."""
    currency = rng.choice(CURRENCIES)
    # Rounded here, not when written: yen have no decimals, and the plural follows the value.
    value = round(rng.uniform(2, 99_999), numbers.get_currency_precision(currency))
    return lambda locale: numbers.format_currency(
        value, currency, locale=locale, format_type="name"
    )


def _interval(rng: random.Random) -> Writer:
    """Apr 3 – 9, 2025."""
    start = _day(rng, 1990, 2040)
    end = start + datetime.timedelta(days=rng.randint(1, 400))
    return lambda locale: dates.format_interval(start, end, "yMMMd", locale=locale)


def _country_list(rng: random.Random, countries: list[str]) -> Writer:
    """Chile, Ghana, or Nepal."""
    chosen, style = rng.sample(countries, rng.randint(2, 5)), rng.choice(("standard", "or"))
    return lambda locale: lists.format_list(
        [locale.territories[code] for code in chosen], style=style, locale=locale
    )


def _language_list(rng: random.Random, languages: list[str]) -> Writer:
    """Basque, Hindi, and Zulu."""
    chosen = rng.sample(languages, rng.randint(2, 4))
    return lambda locale: lists.format_list(
        [locale.languages[code] for code in chosen], style="standard", locale=locale
    )
