"""Encodes and decodes large JSON in parts, so that other threads run in between. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from json.scanner import make_scanner
from typing import Any

# ---- encoding ------------------------------------------------------------------------------------

MAX_DEPTH = 8  # deeper values are not lists of vectors; one call writes them
MAX_LIST = 10_000  # most values of a list that one call writes


def encode_in_parts(
    value: Any,
    separators: tuple[str, str] = (", ", ": "),
    errors: str = "replace",
    *,
    allow_nan: bool = True,
) -> bytes:
    """Returns the JSON of a value as UTF-8, as `json.dumps(…, ensure_ascii=False)` does.

    One call of `json.dumps` holds the interpreter's lock until it returns: 0.4 s for 256 vectors of
    2048 numbers. This function calls `json.dumps` for each vector, and for parts of long lists.
    `errors`: the handling of halves of surrogate pairs, see `str.encode`. Raises ValueError for NaN
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
        return f"[{comma.join(_text(item, separators, depth - 1, dumps) for item in value)}]"
    if depth and isinstance(value, list) and len(value) > MAX_LIST:
        starts = range(0, len(value), MAX_LIST)
        return f"[{comma.join(dumps(value[at : at + MAX_LIST])[1:-1] for at in starts)}]"
    return dumps(value)


# ---- decoding ------------------------------------------------------------------------------------

PART = 64 * 1024  # most characters that one call of the decoder reads, unless a string is longer
MAX_MISSES = 8  # most failed reads of values and of runs of values, in each part
# Reads a value at a position of a text. Returns the value and its end.
_scan: Callable[[str, int], tuple[Any, int]] = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]
_SPACE = re.compile(r"[ \t\n\r]*")
# Ends of values in a list or an object: of an object, of a list, of any other value.
_CUTS = ("},", "],", ",")


def decode_in_parts(text: str) -> Any:
    """Returns the value that `json.loads` makes of a text.

    `json.loads` holds the interpreter's lock until it returns: 0.1 to 0.3 s for 8 MB of small
    numbers. This function reads at most PART characters, or one string, at a time. Raises
    JSONDecodeError, and RecursionError for values that are nested too deeply.
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
    """Reads JSON values of a text.

    Methods get the position of a value; they return the value and the position after it.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._window, self._base = "", 0  # a part of the text, and its position
        self._misses = 0
        self._tried_from = 0  # position from which failed searches for runs are counted
        self._no_runs = 0

    def skip(self, place: int) -> int:
        """Returns the position after white space."""
        space = _SPACE.match(self._text, place)
        assert space is not None
        return space.end()

    def value(self, place: int) -> tuple[Any, int]:
        """Reads the value at a position."""
        small = self._small(place)
        if small is not None:
            return small
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
        """Returns the value at `place` and its end, if it ends within about PART characters.

        Returns None for a larger value, and for text that is not a value.
        """
        for _ in range(2):
            end_of_window = self._base + len(self._window)
            if self._base <= place < end_of_window:
                if self._misses >= MAX_MISSES:
                    return None
                try:
                    value, end = _scan(self._window, place - self._base)
                except (StopIteration, ValueError):
                    pass
                else:  # the window may end inside a number, as after `1.` or `1e+`
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
        """Reads list items or members (a run) in one call of the decoder, up to a comma.

        The comma is chosen among the last commas of the next PART characters. Returns the values,
        and the position after the comma. Returns None if no such comma ends a value.
        """
        if place - self._tried_from >= PART:
            self._tried_from, self._no_runs = place, 0
        if self._no_runs >= MAX_MISSES:
            return None
        part = self._text[place : place + PART]
        cuts = [part.rfind(mark) + len(mark) - 1 for mark in _CUTS]
        # If other lists follow a list of numbers in this part, the run may have to end at the last
        # comma before the end of the list of numbers.
        cuts.append(part.rfind(",", 0, max(0, part.find(brackets[1]))))
        for cut in cuts:
            if cut < 1:
                continue
            try:
                run = f"{brackets[0]}{part[:cut]}{brackets[1]}"
                values, end = _scan(run, 0)
            except (StopIteration, ValueError):
                continue
            if end == len(run):
                return values, self.skip(place + cut + 1)
        self._no_runs += 1
        return None

    def _runs(self, place: int, brackets: str, add: Callable[[Any], None]) -> int:
        """Reads runs (see `_run`) from a position on, and passes the values of each to `add`.

        Returns the position after the runs.
        """
        while (run := self._run(place, brackets)) is not None:
            add(run[0])
            place = run[1]
        return place

    def _list(self, place: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        try_at = 0  # the position of the next search for a run of values
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
        """Returns the position after a delimiter and white space."""
        if self._text[place : place + 1] != mark:
            raise json.JSONDecodeError(f"Expecting {mark!r} delimiter", self._text, place)
        return self.skip(place + 1)
