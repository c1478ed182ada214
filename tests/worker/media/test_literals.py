"""Markers of images that a user writes into a message."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.worker.media import literals
from mlxpool.worker.media.settings import ImagePlaces

PLACES = ImagePlaces("<img>", "\n<img><slot></img>\n", "\n<img><slot></img>\n", "<slot>", 9, True)

MARKERS = literals.literals_of(PLACES)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def test_messages_without_a_marker_stay_as_they_are() -> None:
    messages = [user("plain"), user([{"type": "text", "text": "a"}, {"type": "image", "blob": 0}])]
    assert literals.seamed(messages, MARKERS) == (messages, "")
    assert literals.cuts_of("text", "") == ("text", [])


def test_a_marker_in_a_text_is_cut_and_the_text_stays() -> None:
    parts = [{"type": "text", "text": "<slot>"}, {"type": "image", "blob": 0}]
    messages = [user("a <img> b"), user(parts), user("c", reasoning_content="<img>", name="<img>")]
    changed, seam = literals.seamed(messages, MARKERS)
    assert messages[0] == user("a <img> b"), "the given messages stay as they are"
    first, second, third = changed
    assert literals.cuts_of(first["content"], seam) == ("a <img> b", [3])
    assert literals.cuts_of(second["content"][0]["text"], seam) == ("<slot>", [1])
    assert second["content"][1] == parts[1] and third["name"] == "<img>"
    assert literals.cuts_of(third["reasoning_content"], seam) == ("<img>", [1])
    assert literals.parts_of("a <img> b", [3]) == ["a <", "img> b"]


def test_what_the_model_wrote_keeps_tokens_that_are_not_special() -> None:
    texts = ["<|end|> <tool_call>", "plain"]
    messages = [user(texts[0]), {"role": "assistant", "content": texts[0]}, user(texts[1])]
    changed, seam = literals.seamed(messages, ["<|end|>", "<|end", "x"], ["<tool_call>"])
    cuts = [literals.cuts_of(message["content"], seam) for message in changed]
    assert cuts == [(texts[0], [1, 9]), (texts[0], [1]), (texts[1], [])]


def test_a_seam_is_in_no_text() -> None:
    messages = [user(f"<img>{literals.SEAMS[0]}")]
    assert literals.seamed(messages, MARKERS)[1] == literals.SEAMS[1]
    messages = [user("<img>" + "".join(literals.SEAMS))]
    assert literals.seamed(messages, MARKERS) == (messages, "")


def test_what_stands_for_an_image_elsewhere_is_refused() -> None:
    literals.check_literals(["a <", "img> b"], PLACES)
    literals.check_ids_of_text([8, 10], PLACES)
    for text in ("a <img>", "<slot>"):
        with pytest.raises(BadRequest, match="reads as the place of an image: leave it out"):
            literals.check_literals(["a", text], PLACES)
    with pytest.raises(BadRequest, match="the token id 9 of '<slot>', which this model reads"):
        literals.check_ids_of_text([8, 9], PLACES)
