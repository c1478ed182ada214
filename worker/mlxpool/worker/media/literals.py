"""Keeps the markers of images, and other tokens, that a message has as text plain text. Pure.

A chat template writes a marker for each image, so a marker that a user has written would stand for
an image, too. `seamed` puts a seam into it, `cuts_of` takes the seams out of the rendered chat and
returns their places. Tokenizing the parts between these places one by one gives the ids of the
same text, and none of them is that of a marker.
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
KEYS = ("content", "reasoning_content")  # of messages, whose texts are seamed


def literals_of(places: ImagePlaces) -> tuple[str, ...]:
    """Returns the texts that stand for an image: the marker of the template, the slot token."""
    return tuple(dict.fromkeys((places.marker, places.slot)))


def seamed(
    messages: Sequence[Mapping[str, Any]], literals: Sequence[str], foreign: Sequence[str] = ()
) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Returns messages with a seam in each literal of their texts, and the seam.

    `foreign`: further literals in messages that the model did not write. The messages are returned
    as they are, with "", where no text has a literal, or where the texts have all SEAMS already.
    """
    own, every = _pattern(literals), _pattern([*literals, *foreign])
    if every is None:
        return messages, ""
    texts = [*texts_of(messages)]
    if not any(every.search(text) for text in texts):
        return messages, ""
    seam = next((one for one in SEAMS if not any(one in text for text in texts)), "")
    if not seam:
        return messages, ""

    def seam_in(found: re.Match[str]) -> str:
        return found[0][0] + seam + found[0][1:]

    def changed(message: Mapping[str, Any]) -> Mapping[str, Any]:
        pattern = own if message["role"] == "assistant" else every
        return message if pattern is None else _mapped(message, partial(pattern.sub, seam_in))

    return [*map(changed, messages)], seam


@lru_cache(maxsize=16)
def _compiled(literals: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(one) for one in sorted(literals, key=len, reverse=True)))


def _pattern(literals: Sequence[str]) -> re.Pattern[str] | None:
    """What finds literals, the longest first; a single character cannot be divided."""
    found = tuple(dict.fromkeys(one for one in literals if len(one) > 1))
    return _compiled(found) if found else None


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Returns the texts of messages: contents, their parts, and thoughts."""
    for message in messages:
        for key in KEYS:
            value = message.get(key)
            if isinstance(value, str):
                yield value
            elif isinstance(value, list | tuple):
                yield from (part["text"] for part in value if part["type"] == "text")


def _mapped(message: Mapping[str, Any], changed: Any) -> dict[str, Any]:
    """Returns a message whose texts are `changed`."""
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
    """Returns a text without its seams, and where they were: places in the text that is returned.

    `seam`: "" if there are none.
    """
    if not seam:
        return text, []
    parts = text.split(seam)
    return "".join(parts), ends_of(parts)


def ends_of(parts: Sequence[str]) -> list[int]:
    """Returns where each of the parts of a text ends in it, but for the last one."""
    return [*accumulate(map(len, parts[:-1]))]


def parts_of(text: str, cuts: Sequence[int]) -> list[str]:
    """Returns the parts of a text between its cuts."""
    return [text[begin:end] for begin, end in pairwise((0, *cuts, len(text)))]


def check_literals(parts: Sequence[str], places: ImagePlaces) -> None:
    """Raises BadRequest for a part with a text that stands for an image."""
    for literal in literals_of(places):
        if any(literal in part for part in parts):
            raise BadRequest(
                f"the prompt has the text {literal!r}, which this model reads as the place of an"
                " image: leave it out; only in the content of a message it is text like any other"
            )


def check_ids_of_text(ids: Sequence[int], places: ImagePlaces) -> None:
    """Raises BadRequest for an id that stands for an image in a prompt without images."""
    if places.slot_id in ids:
        raise BadRequest(
            f"the prompt has the token id {places.slot_id} of {places.slot!r}, which this model"
            " reads as the place of an image: leave it out"
        )
