"""The messages and tools of a chat: the checked form, and errors that name the fault."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.chat import (
    INVALID_JSON,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ROLES,
    check_messages,
    check_tools,
    joined,
)

USER = {"role": "user", "content": "hi"}
CALL = {"id": "a1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def calling(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


@pytest.mark.parametrize("role", ROLES)
def test_messages_of_every_role_pass(role: str) -> None:
    assert check_messages([{"role": role, "content": ""}]) == [{"role": role, "content": ""}]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": []},
        calling(CALL),
        calling(CALL, content=None),
        calling(CALL, content="I look", reasoning_content="hm"),
        {"role": "assistant", "content": "x", "tool_calls": []},
        {"role": "assistant", "content": "x", "tool_calls": None, "name": None},
        {"role": "tool", "content": "12:00", "tool_call_id": "a1", "name": "clock"},
        {"role": "user", "content": "x", "a_key_that_templates_may_know": [1, {"b": 2}]},
    ],
)
def test_checked_messages_keep_their_other_keys(message: dict[str, Any]) -> None:
    assert check_messages([message]) == [message]


def test_images_beside_the_content_are_refused() -> None:
    with pytest.raises(BadRequest, match=r"messages\[1\].images is not supported: name each image"):
        check_messages([USER, {**USER, "images": [b"a"]}])
    assert check_messages([{**USER, "images": None}, {**USER, "images": []}])


@pytest.mark.parametrize("given", ['{"zone": "UTC"}', {"zone": "UTC"}])
def test_arguments_of_a_tool_call_become_a_map(given: Any) -> None:
    call = {"function": {"name": "clock", "arguments": given}}
    (message,) = check_messages([calling(call)])
    assert message["tool_calls"][0]["function"]["arguments"] == {"zone": "UTC"}
    assert call["function"]["arguments"] is given, "the request itself is not changed"


@pytest.mark.parametrize("given", ["{", "[1]", "5", "[" * 9**5, '{"a": Oslo}', '"{}"'])
def test_arguments_that_a_model_wrote_wrongly_are_kept_as_text(given: str) -> None:
    (message,) = check_messages([calling({"function": {"name": "f", "arguments": given}})])
    assert message["tool_calls"][0]["function"]["arguments"] == {INVALID_JSON: given}


@pytest.mark.parametrize("given", [None, "", "{}", {}, " ", "null"])
def test_a_tool_call_without_arguments_gets_an_empty_map(given: Any) -> None:
    (message,) = check_messages([calling({"function": {"name": "f", "arguments": given}})])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"list of 1 to 4096 maps, got 0"),
        ("hi", "got 'hi'"),
        (None, "got None"),
        ([USER] * (MAX_MESSAGES + 1), "got 4097"),
        (["hi"], r"messages\[0\] must be a map.*got 'hi'"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\].role is 'robot', must be one of sys"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\].role is \['user'\]"),
        ([{"content": "x"}], r"messages\[0\].role is None"),
        ([USER, {"role": "user"}], r"messages\[1\] has no content; only one with tool_calls"),
        ([{"role": "assistant", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be text.* got int"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be.* its type is 'str'"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"content\[0\].blob must be.* got None",
        ),
        ([{"role": "user", "content": [{"type": "image", "blob": -1}]}], "blob must be.* got -1"),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\].* type is 'audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] must be"),
        ([{**USER, "name": 5}], r"messages\[0\].name must be text, got 5"),
        ([{**USER, "reasoning_content": []}], r"reasoning_content must be text, got \[\]"),
        ([{**USER, "tool_calls": [CALL]}], "only an assistant calls tools, the role is 'user'"),
        ([calling(*[CALL] * (MAX_TOOL_CALLS + 1))], "at most 256 maps, got 257"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list.* got 'x'"),
        ([calling(5)], r"tool_calls\[0\] must be a map with a `function`, got 5"),
        ([calling({"function": {}})], r"tool_calls\[0\].function.name must be text.* got None"),
        ([calling({"function": {"name": "f", "arguments": 0}})], "must be a map.* got 0"),
        ([calling({"function": {"name": "f", "arguments": [1]}})], r"must be a map.* got \[1\]"),
    ],
)
def test_malformed_messages_are_refused_with_their_index(messages: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        check_messages(messages)


def test_tools_pass_with_and_without_a_function_key() -> None:
    bare = {"name": "clock", "description": "the time"}
    assert check_tools([TOOL, bare]) == [TOOL, bare]
    assert check_tools(None) == check_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("x", "tools must be a list of at most 256 maps, got 'x'"),
        ([TOOL] * (MAX_TOOLS + 1), "at most 256 maps, got 257"),
        ([TOOL, 5], r"tools\[1\] must be a map, got 5"),
        ([{"function": "clock"}], r"tools\[0\].function must be a map, got 'clock'"),
        ([{"function": {"name": ""}}], r"tools\[0\].function.name must be text .* got ''"),
        ([{}], r"tools\[0\].name must be text"),
        ([{"name": "f", "parameters": [1]}], r"tools\[0\]: parameters must be a map"),
    ],
)
def test_malformed_tools_are_refused_with_their_index(tools: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        check_tools(tools)


def test_the_texts_of_a_content_are_joined() -> None:
    image = {"type": "image", "blob": 0}
    parts = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    assert [joined(parts), joined("ab"), joined(None), joined([])] == ["ab", "ab", "", ""]
