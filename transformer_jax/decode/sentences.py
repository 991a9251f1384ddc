"""Cutting a text that is too long for the model where it hurts least."""

import re
from collections.abc import Callable

# Ends of sentences with their closing quotes, then of clauses, then words, then characters. The
# group is what stays; the wide marks of Chinese and Japanese need no space behind them.
_ENDS = (
    re.compile(r"([.!?…][\"'»”’“)\]]*)\s+|([。！？｡][」』”）]*)"),
    re.compile(r"([;:,–—])\s+|([；：，、､])"),
    re.compile(r"()\s+"),
    re.compile(r"(.)", re.DOTALL),
)


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Parts of a text that each fit, as few and as whole as a left-to-right pass finds.

    Nothing but white space at the cuts is lost. A single character is a part even if it does
    not fit.

    Args:
        text: any.
        fits: whether a part is short enough.
    """
    return _split(text, fits, 0)


def _split(text: str, fits: Callable[[str], bool], level: int) -> list[str]:
    if level == len(_ENDS) or fits(text):
        return [text]
    cuts = [(m.end(m.lastindex or 0), m.end()) for m in _ENDS[level].finditer(text)]
    parts: list[str] = []
    begin = end = following = 0  # the part under way is text[begin:end]
    for stop, behind in [*cuts, (len(text), len(text))]:
        if end > begin and not fits(text[begin:stop]):
            parts += _split(text[begin:end], fits, level + 1)
            begin = following
        end, following = stop, behind
    return parts + _split(text[begin:end], fits, level + 1)
