"""Makes control characters visible: text of a model or a client must not control a terminal.

A terminal obeys escape sequences and carriage returns. A line break forges a line of a log. Marks
of bidirectional text reorder the characters of a line. Each such character becomes an escape such
as \\x1b, and so does a lone surrogate, which no output can encode.
"""

from __future__ import annotations

import re

_MARKS = r"\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
CONTROLS = re.compile(rf"[\x00-\x1f{_MARKS}]")
_BUT_LINES_AND_TABS = re.compile(rf"[\x00-\x08\x0b-\x1f{_MARKS}]")


def escape_line(text: str) -> str:
    """Returns a text as one line: line breaks and tabs are escaped as well."""
    return CONTROLS.sub(_escape, text)


def escape_text(text: str) -> str:
    """Returns a text of many lines, such as a completion; keeps line feeds and tabs."""
    return _BUT_LINES_AND_TABS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
