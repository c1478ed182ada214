"""The items of a request to the Responses API, converted into messages."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.openai.responses_api.items import conversation_of

USER = {"role": "user", "content": "Paris?"}
THOUGHTS = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
SAID = {
    "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
    "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
}  # fmt: skip
CALL = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "id": "fc_1"}
REMOTE = {"type": "input_image", "image_url": "http://a"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "18"}


def messages(*items: Any, instructions: str = "") -> list[dict[str, Any]]:
    return conversation_of(list(items), instructions).messages


def test_a_text_is_a_users_message() -> None:
    chat = conversation_of("hi", "Be short.").messages
    assert chat == [
        {"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"},
    ]  # fmt: skip


def test_thoughts_text_and_calls_are_one_message() -> None:
    user, said, result = messages(USER, THOUGHTS, SAID, CALL, RESULT)
    assert user == USER
    assert said["reasoning_content"] == "Hm." and said["content"] == "I look."
    function = {"name": "weather", "arguments": "{}"}
    assert said["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert result == {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "18"}


def test_several_calls_are_one_message_and_later_thoughts_another() -> None:
    chat = messages(USER, CALL, {**CALL, "call_id": "b"}, RESULT, THOUGHTS, CALL)
    assert [message["role"] for message in chat] == ["user", "assistant", "tool", "assistant"]
    assert len(chat[1]["tool_calls"]) == 2 and chat[3]["reasoning_content"] == "Hm."
    assert [message["role"] for message in messages(SAID, SAID, CALL, THOUGHTS)] == [
        "assistant"
    ] * 3


def test_a_summary_stands_for_thoughts() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert messages(summary)[0]["reasoning_content"] == "Hm."
    assert messages({"type": "reasoning", "summary": []}, USER) == [USER]


def test_an_image_is_named_by_its_place() -> None:
    url = f"data:image/png;base64,{base64.b64encode(b'one').decode()}"
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url}]
    conversation = conversation_of([{"role": "user", "content": parts}], "")
    assert conversation.images == [b"one"]
    assert conversation.messages[0]["content"] == [
        {"type": "text", "text": "What?"}, {"type": "image", "blob": 0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["web_search_call", "item_reference", "additional_tools", "compaction", "tool_search_output"],
)
def test_items_that_no_model_reads_are_left_out(kind: str) -> None:
    assert messages(USER, {"type": kind, "id": "x", "status": "completed"}, USER) == [USER, USER]
    sealed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    assert messages({**sealed, "content": None}, USER) == [USER]


@pytest.mark.parametrize(
    ("call", "result", "function", "told"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
            {"name": "patch", "arguments": '{"input": "x"}'}, "ok",
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "c", "output": ["a"]},
            {"name": "local_shell", "arguments": '{"command": ["ls"]}'}, '["a"]',
        ),
        (
            {"type": "function_call", "call_id": "c", "namespace": "mcp", "name": "f",
             "arguments": None},
            {"type": "function_call_output", "call_id": "c", "output": None},
            {"name": "mcp__f", "arguments": ""}, "",
        ),
    ],
)  # fmt: skip
def test_calls_of_other_kinds_are_kept_as_text(
    call: Any, result: Any, function: Any, told: str
) -> None:
    _, said, answer = messages(USER, call, result)
    assert said["tool_calls"] == [{"id": "c", "type": "function", "function": function}]
    assert (answer["tool_call_id"], answer["name"]) == ("c", function["name"])
    assert answer["content"] == told


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (5, "input[0] must be a map with a type"),
        ({"type": 5}, "input[0].type is 5"),
        ({"role": "tool", "content": "x"}, "input[0].role is 'tool'"),
        ({"role": "user", "content": 5}, "input[0].content must be text or a list"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "has the type 'input_file'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text must be text"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "file_id"),
        ({"role": "user", "content": [REMOTE]}, "not fetched"),
        ({**CALL, "arguments": 5}, "input[0].arguments must be JSON text"),
        ({**CALL, "call_id": ""}, "input[0].call_id must not be empty"),
        ({"type": "reasoning", "content": 5}, "input[0].content must be a list"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(item: Any, words: str) -> None:
    with pytest.raises(HttpError) as caught:
        conversation_of([item], "")
    assert words in caught.value.message and caught.value.param == "input"


@pytest.mark.parametrize("given", [None, 5, [], [USER] * 5000])
def test_input_is_text_or_items(given: Any) -> None:
    with pytest.raises(HttpError, match="must be text or a list of 1 to 4096 items"):
        conversation_of(given, "")
