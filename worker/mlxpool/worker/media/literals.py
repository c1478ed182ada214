"""Makes the tokenizer read image markers and special tokens of a user as plain text. Pure.

A chat template writes a marker for each image. A marker in a user's text would therefore be read as
a further image. Before the template runs, `seamed` puts a seam (an unused character) into such a
marker. `cuts_of` removes the seams from the rendered chat and returns their positions. The parts
between these positions are tokenized separately. So the token ids belong to the unchanged text, but
none of them is the id of a marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

from mlxpool.common.errors import BadRequest
from mlxpool.worker.media.settings import ImagePlaces

SEAMS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters of Unicode, which no text needs
KEYS = ("content", "reasoning_content")  # keys of a message whose texts get seams


def literals_of(places: ImagePlaces) -> tuple[str, ...]:
    """Returns the texts that denote an image: the chat template's marker and the slot token."""
    return tuple(dict.fromkeys((places.marker, places.slot)))


def seamed(
    messages: Sequence[Mapping[str, Any]], literals: Sequence[str], foreign: Sequence[str] = ()
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Inserts a seam into each literal in the texts of messages; returns messages and seam.

    A literal is a text that must be read as plain text, such as an image marker. A seam is one
    unused character. `literals` are searched in all messages, `foreign` only in messages that the
    model did not write. If no text has a literal, or if every character of SEAMS occurs in the
    texts, returns the same messages and "".
    """
    own, all_literals = _pattern(literals), _pattern([*literals, *foreign])
    if all_literals is None:
        return messages, ""
    texts = [*texts_of(messages)]
    if not any(all_literals.search(text) for text in texts):
        return messages, ""
    seam = next((char for char in SEAMS if not any(char in text for text in texts)), "")
    if not seam:
        return messages, ""

    def seam_in(match: re.Match[str]) -> str:
        return match[0][0] + seam + match[0][1:]

    def changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
        pattern = own if message["role"] == "assistant" else all_literals
        return message if pattern is None else _mapped(message, partial(pattern.sub, seam_in))

    return [*map(changed, messages)], seam


@lru_cache(maxsize=16)
def _compiled(literals: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(re.escape(literal) for literal in longest_first))


def _pattern(literals: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern that matches the literals of two or more characters.

    Returns None if there are no such literals.
    """
    divisible = tuple(dict.fromkeys(literal for literal in literals if len(literal) > 1))
    return _compiled(divisible) if divisible else None


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the texts of messages: contents, their parts, and thoughts."""
    for message in messages:
        for key in KEYS:
            value = message.get(key)
            if isinstance(value, str):
                yield value
            elif isinstance(value, list | tuple):
                yield from (part["text"] for part in value if part["type"] == "text")


def _mapped(message: Mapping[str, Any], changed: Any) -> dict[str, Any]:
    """Returns a copy of a message in which each text is replaced by `changed(text)`."""
    copy = dict(message)
    for key in KEYS:
        value = copy.get(key)
        if isinstance(value, str):
            copy[key] = changed(value)
        elif isinstance(value, list | tuple):
            copy[key] = [
                {**part, "text": changed(part["text"])} if part["type"] == "text" else part
                for part in value
            ]
    return copy


def cuts_of(text: str, seam: str) -> tuple[str, list[int]]:
    """Returns a text without its seams, and the seams' positions in the returned text.

    `seam` is "" if the text has no seams.
    """
    if not seam:
        return text, []
    parts = text.split(seam)
    return "".join(parts), ends_of(parts)


def ends_of(parts: Sequence[str]) -> list[int]:
    """Returns the end position of each part in the joined text, except the last part's."""
    return [*accumulate(map(len, parts[:-1]))]


def parts_of(text: str, cuts: Sequence[int]) -> list[str]:
    """Returns the parts of a text between its cuts."""
    return [text[begin:end] for begin, end in pairwise((0, *cuts, len(text)))]


def check_literals(parts: Sequence[str], places: ImagePlaces) -> None:
    """Raises BadRequest if a part has a text that the model would read as an image."""
    for literal in literals_of(places):
        if any(literal in part for part in parts):
            raise BadRequest(
                f"the prompt has the text {literal!r}, which this model reads as the place of an"
                " image: leave it out; only in the content of a message it is text like any other"
            )


def check_ids_of_text(ids: Sequence[int], places: ImagePlaces) -> None:
    """Raises BadRequest for an id of an image in a prompt without images."""
    if places.slot_id in ids:
        raise BadRequest(
            f"the prompt has the token id {places.slot_id} of {places.slot!r}, which this model"
            " reads as the place of an image: leave it out"
        )
