"""The messages of an Anthropic request, converted into the pool's messages."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mlxpool.client import Result
from mlxpool.gateway.anthropic.blocks import conversation_of
from mlxpool.gateway.anthropic.bodies import stop_in
from mlxpool.gateway.errors import HttpError

TEXT = {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "18"}
THOUGHTS = {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}


def messages(*given: dict[str, Any], system: Any = None) -> list[dict[str, Any]]:
    return conversation_of(system, list(given)).messages


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_the_system_is_text_or_blocks() -> None:
    for system in ("I look.", [TEXT]):
        first, _ = messages(user(TEXT), system=system)
        assert first == {"role": "system", "content": "I look."}
    assert len(messages(user(TEXT), system=[])) == 1
    _, later, _ = messages(user(TEXT), {"role": "system", "content": [TEXT]}, user(TEXT))
    assert later == {"role": "system", "content": "I look."}


def test_thoughts_text_and_calls_are_one_message() -> None:
    said = {"role": "assistant", "content": [THOUGHTS, TEXT, CALL]}
    asked, answer, result = messages({"role": "user", "content": "Paris?"}, said, user(RESULT))
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert asked["content"] == "Paris?"
    assert answer == {
        "role": "assistant", "content": "I look.", "reasoning_content": "Hm.",
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }  # fmt: skip
    assert result == {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "18"}


def test_results_are_messages_of_their_own() -> None:
    failed = {**RESULT, "content": [{"type": "text", "text": "no"}], "is_error": True}
    chat = messages(user(RESULT, failed, {"type": "tool_result", "tool_use_id": "b"}, TEXT, TEXT))
    assert [message["role"] for message in chat] == ["tool", "tool", "tool", "user"]
    assert [message["content"] for message in chat] == ["18", "Error: no", "", "I look.\nI look."]


def test_an_image_is_named_by_its_place() -> None:
    data = base64.b64encode(b"one").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    conversation = conversation_of(None, [user(image, TEXT)])
    assert conversation.images == [b"one"]
    assert conversation.messages[0]["content"] == [
        {"type": "image", "blob": 0}, {"type": "text", "text": "I look."},
    ]  # fmt: skip


def test_images_of_results_come_behind_all_results() -> None:
    data = base64.b64encode(b"one").decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    seen = {**RESULT, "content": [image]}
    chat = messages(user(seen, RESULT, TEXT))
    assert [message["role"] for message in chat] == ["tool", "tool", "user"]
    assert chat[0]["content"] and chat[2]["content"][0] == {"type": "image", "blob": 0}


def test_what_other_servers_have_done_is_left_out_or_kept_as_text() -> None:
    kinds = ("server_tool_use", "web_search_tool_result", "redacted_thinking", "mcp_tool_use")
    others = [{"type": kind, "id": "s", "data": "x", "input": {}} for kind in kinds]
    summary = {"type": "compaction", "content": "What was."}
    _, said = messages(
        user(TEXT), {"role": "assistant", "content": [*others, summary, TEXT]}, user(TEXT)
    )[:2]
    assert said == {"role": "assistant", "content": "What was.\nI look."}
    page = {"type": "document", "source": {"type": "text", "data": "A page."}, "title": "T"}
    assert messages(user(page))[0]["content"] == "T\nA page."
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}
    (message,) = messages(user({**RESULT, "content": [pdf, TEXT]}))
    assert "cannot read" in message["content"] and "I look." in message["content"]
    with pytest.raises(HttpError, match=r"document of 'application/pdf': .* send the text"):
        messages(user(pdf))


@pytest.mark.parametrize(
    ("text", "said", "stop"),
    [
        ("one two STOP", "one two ", "STOP"),
        ("one two STO", "one two ", None),
        ("one two<|end|>", "one two", None),
        ("one ab", " one ", "ab"),  # a tokenizer leaves the first blank out
        ("one abc", "one ", "ab"),  # the stop that is complete first
    ],
)
def test_the_stop_that_ended_an_answer(text: str, said: str, stop: str | None) -> None:
    result = Result(said, (), "stop", {}, {}, 0, 1)
    assert stop_in(text, result, ["abc", "STOP", "ab"]) == stop
