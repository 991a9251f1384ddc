"""Texts that are cut in parts: nothing but white space is lost."""

import random

import pytest

from transformer_jax.decode.sentences import split_text

TEXT = "Er sagte: „Hallo!“ Dann ging er. Sie blieb (lange) dort, weil es regnete; niemand kam."


@pytest.mark.parametrize(
    ("longest", "parts"),
    [
        (200, [TEXT]),
        (
            40,
            [
                "Er sagte: „Hallo!“ Dann ging er.",
                "Sie blieb (lange) dort, weil es regnete;",
                "niemand kam.",
            ],
        ),
        (
            18,
            [
                "Er sagte: „Hallo!“",
                "Dann ging er.",
                "Sie blieb (lange)",
                "dort,",
                "weil es regnete;",
                "niemand kam.",
            ],
        ),
    ],
)
def test_sentences_then_clauses_then_words(longest, parts):
    """Bug: closing quotes begin the next sentence, or words are cut where clauses would do."""
    assert split_text(TEXT, lambda part: len(part) <= longest) == parts


def test_wide_marks_need_no_space():
    """Bug: Chinese text is cut between any two characters."""
    assert split_text("你好。「世界！」再见。", lambda part: len(part) <= 5) == [
        "你好。",
        "「世界！」",
        "再见。",
    ]


def test_nothing_is_lost():
    """Bug: characters at the cuts, or the rest behind the last one, vanish; a part is too long."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("ab.,;! \t。é\U0001f98a", k=draw.randrange(1, 40)))
        longest = draw.randrange(1, 12)
        parts = split_text(text, lambda part, longest=longest: len(part) <= longest)
        assert all(len(part) <= longest for part in parts)
        assert "".join("".join(parts).split()) == "".join(text.split())
