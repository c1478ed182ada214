"""Control characters made visible, in one line and in a text of many lines."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from mlxpool.common.escapes import CONTROLS, escape_line, escape_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain, né 𝄞 こんにちは 👩‍💻", "plain, né 𝄞 こんにちは 👩‍💻"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("\0\b\x7f\x80\x9b\x9f", r"\x00\x08\x7f\x80\x9b\x9f"),
        ("over\rwritten", r"over\rwritten"),
        ("\x0b\x0c\x85", r"\x0b\x0c\x85"),
        ("\u202egpj.exe\u202c \u2066\u2069\u200e\u200f\u061c", None),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800\udcff", r"\ud800\udcff"),
        (r"a\x1b", r"a\x1b"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str | None) -> None:
    expected = text.encode("ascii", "backslashreplace").decode() if shown is None else shown
    assert escape_line(text) == escape_text(text) == expected
    assert escape_line(expected) == expected


def test_line_feeds_and_tabs_stay_in_a_text_of_many_lines() -> None:
    assert escape_text("a\n\tb\r\n") == "a\n\tb\\r\n"
    assert escape_line("a\n\tb\r\n") == r"a\n\tb\r\n"


def test_all_control_characters_and_all_that_reorder_text_are_escaped() -> None:
    reordering = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    expected = {
        char
        for char in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(char) in reordering
    }
    actual = {char for char in map(chr, range(sys.maxunicode + 1)) if CONTROLS.match(char)}
    assert actual == expected | set("\u200e\u200f\u061c")
