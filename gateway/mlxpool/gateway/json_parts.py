"""Large JSON, made and read in parts, so that other threads have their turns. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from json.scanner import make_scanner
from typing import Any

# ---- made ----------------------------------------------------------------------------------------

MAX_DEPTH = 8  # what is nested deeper is no list of vectors, and is made at once
MAX_LIST = 10_000  # values of a list that one call writes


def encode_in_parts(
    value: Any,
    separators: tuple[str, str] = (", ", ": "),
    errors: str = "replace",
    *,
    allow_nan: bool = True,
) -> bytes:
    """The JSON of a value as UTF-8, as `json.dumps(…, ensure_ascii=False)` makes it.

    One call of `json.dumps` holds the interpreter's lock until it returns, which is 0.4 s for 256
    vectors of 2048 numbers. Here a call is made for each vector, and for parts of long lists.
    `errors`: what becomes of halves of surrogate pairs, see `str.encode`. Raises ValueError for NaN
    and infinities unless `allow_nan`.
    """
    dumps = partial(json.dumps, ensure_ascii=False, separators=separators, allow_nan=allow_nan)
    return _text(value, separators, MAX_DEPTH, dumps).encode("utf-8", errors)


def _text(value: Any, separators: tuple[str, str], depth: int, dumps: Callable[[Any], str]) -> str:
    comma, colon = separators
    if depth and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        members = (
            f"{dumps(key)}{colon}{_text(member, separators, depth - 1, dumps)}"
            for key, member in value.items()
        )
        return f"{{{comma.join(members)}}}"
    if depth and isinstance(value, list) and value and isinstance(value[0], dict | list):
        return f"[{comma.join(_text(one, separators, depth - 1, dumps) for one in value)}]"
    if depth and isinstance(value, list) and len(value) > MAX_LIST:
        starts = range(0, len(value), MAX_LIST)
        return f"[{comma.join(dumps(value[at : at + MAX_LIST])[1:-1] for at in starts)}]"
    return dumps(value)


# ---- read ----------------------------------------------------------------------------------------

PART = 64 * 1024  # characters that one call of the decoder reads, unless one string has more
MAX_MISSES = 8  # of one part: values, and runs of values, that may be read in vain
# Reads one value at a place of a text, and returns it with the place behind it.
_scan: Callable[[str, int], tuple[Any, int]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_SPACE = re.compile(r"[ \t\n\r]*")
# Where a list or an object may be cut: behind an object, a list, or any other value.
_CUTS = ("},", "],", ",")


def decode_in_parts(text: str) -> Any:
    """The value that `json.loads` makes of a text.

    `json.loads` is one call, which holds the interpreter's lock until it returns: 0.1 to 0.3 s for
    8 MB of small numbers. Here a call reads at most PART characters, or one string. Raises
    JSONDecodeError, and RecursionError for what is nested too deeply.
    """
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("Unexpected UTF-8 BOM (decode using utf-8-sig)", text, 0)
    reader = _Reader(text)
    value, end = reader.value(reader.skip(0))
    end = reader.skip(end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class _Reader:
    """Reads values at places of a text. Each returns the value and the place behind it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._window, self._base = "", 0  # the part of the text that begins at this place
        self._misses = 0
        self._tried_from = 0  # in the part behind this place so many runs were not found
        self._no_runs = 0

    def skip(self, place: int) -> int:
        """The place behind white space."""
        found = _SPACE.match(self._text, place)
        assert found is not None
        return found.end()

    def value(self, place: int) -> tuple[Any, int]:
        """One value."""
        found = self._small(place)
        if found is not None:
            return found
        first = self._text[place : place + 1]
        if first == "[":
            return self._list(place + 1)
        return self._object(place + 1) if first == "{" else self._scalar(place)

    def _scalar(self, place: int) -> tuple[Any, int]:
        try:
            value, end = _scan(self._text, place)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", self._text, stop.value) from None
        return value, end

    def _small(self, place: int) -> tuple[Any, int] | None:
        """A value that ends in the window; None for a larger one, and for what is none."""
        for _ in range(2):
            end_of_window = self._base + len(self._window)
            if self._base <= place < end_of_window:
                if self._misses >= MAX_MISSES:
                    return None
                try:
                    value, end = _scan(self._window, place - self._base)
                except (StopIteration, ValueError):
                    pass
                else:  # a number that the end of the window cuts may go on, as 1. and 1e+ do
                    is_whole = self._base + end + 2 < end_of_window
                    if is_whole or end_of_window == len(self._text):
                        return value, self._base + end
                self._misses += 1
                if end_of_window - place >= PART // 2:
                    return None
            self._window, self._base = self._text[place : place + PART], place
            self._misses = 0
        return None

    def _run(self, place: int, brackets: str) -> tuple[Any, int] | None:
        """Values up to a comma near the end of a part, read together; None if none is found.

        What is in front of the comma is whole values, so it is no comma inside one of them.
        """
        if place - self._tried_from >= PART:
            self._tried_from, self._no_runs = place, 0
        if self._no_runs >= MAX_MISSES:
            return None
        part = self._text[place : place + PART]
        cuts = [part.rfind(mark) + len(mark) - 1 for mark in _CUTS]
        # Behind the end of a list of numbers there may be others: before it is the last comma.
        cuts.append(part.rfind(",", 0, max(0, part.find(brackets[1]))))
        for cut in cuts:
            if cut < 1:
                continue
            try:
                run = f"{brackets[0]}{part[:cut]}{brackets[1]}"
                found, end = _scan(run, 0)
            except (StopIteration, ValueError):
                continue
            if end == len(run):
                return found, self.skip(place + cut + 1)
        self._no_runs += 1
        return None

    def _runs(self, place: int, brackets: str, add: Callable[[Any], None]) -> int:
        """Adds all runs of values that follow each other from here on. Returns where they end."""
        while (run := self._run(place, brackets)) is not None:
            add(run[0])
            place = run[1]
        return place

    def _list(self, place: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        try_at = 0  # where a run of values is looked for again
        place = self.skip(place)
        if self._text[place : place + 1] == "]":
            return values, place + 1
        while True:
            if place >= try_at:
                place = self._runs(place, "[]", values.extend)
                try_at = place + PART
            value, place = self.value(place)
            values.append(value)
            place = self.skip(place)
            if self._text[place : place + 1] == "]":
                return values, place + 1
            place = self._behind(place, ",")

    def _object(self, place: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        try_at = 0
        place = self.skip(place)
        if self._text[place : place + 1] == "}":
            return members, place + 1
        while True:
            if place >= try_at:
                place = self._runs(place, "{}", members.update)
                try_at = place + PART
            if self._text[place : place + 1] != '"':
                why = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(why, self._text, place)
            key, place = self._scalar(place)
            place = self._behind(self.skip(place), ":")
            members[key], place = self.value(place)
            place = self.skip(place)
            if self._text[place : place + 1] == "}":
                return members, place + 1
            place = self._behind(place, ",")

    def _behind(self, place: int, mark: str) -> int:
        """The place behind a delimiter and white space."""
        if self._text[place : place + 1] != mark:
            raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", self._text, place)
        return self.skip(place + 1)
