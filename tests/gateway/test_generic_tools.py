"""Tools, calls and results as texts, for a chat template without tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.formats.generic_tools import (
    offered_tools,
    with_calls_as_text,
    with_tools_as_text,
)
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.models import ModelInfo

WEATHER: Any = {"name": "weather", "description": "Of a cité.", "parameters": {"type": "object"}}
TOOLS: Any = [{"type": "function", "function": {**WEATHER, "strict": True}}, {"name": "time"}]
HI: Any = {"role": "user", "content": "hi"}
PARTS: Any = [{"type": "text", "text": "a"}, {"type": "image", "blob": 0}]
ROW = {"name": "m", "state": "ready", "context": 100}


def call(name: str, id: str = "", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_systems_text_ends_with_the_tools() -> None:
    messages = with_tools_as_text([HI], TOOLS)
    (system, user) = messages
    assert system["role"] == "system" and user is HI
    lines = system["content"].splitlines()
    assert json.dumps(WEATHER, ensure_ascii=False) in lines and '{"name": "time"}' in lines
    for role in ("system", "developer"):
        (message, _) = with_tools_as_text([{"role": role, "content": "Be kind."}, HI], TOOLS)
        assert message == {"role": role, "content": f"Be kind.\n\n{system['content']}"}
    (message, _) = with_tools_as_text([{"role": "system", "content": PARTS[:1]}, HI], TOOLS)
    assert "".join(part["text"] for part in message["content"]) == f"a\n\n{system['content']}"


def test_calls_and_results_are_texts_of_assistant_and_user() -> None:
    calls = [call("weather", "x", city="Paris"), call("time", "y")]
    messages = with_calls_as_text(
        [
            HI,
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning_content": "?",
                "tool_calls": calls,
            },
            {"role": "tool", "tool_call_id": "y", "content": "noon"},
            {"role": "tool", "tool_call_id": "x", "content": "sun"},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": None, "tool_calls": [call("weather")]},
            {"role": "tool", "name": "weather", "content": PARTS},
            {"role": "assistant", "content": "ok"},
            {"role": "tool", "content": ""},
        ]
    )
    said = 'Well.\n\nCalled weather with {"city": "Paris"}\nCalled time with {}'
    results = "Result of time:\nnoon\n\nResult of weather:\nsun\n\nAnd now?"
    front = [{"type": "text", "text": text} for text in ("Result of weather:", "\n")]
    assert messages == [
        HI,
        {"role": "assistant", "content": said, "reasoning_content": "?"},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "Called weather with {}"},
        {"role": "user", "content": [*front, *PARTS]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Result of the function:"},
    ]
    other = [HI, {"role": "assistant", "content": "hi"}, HI, HI]
    assert with_calls_as_text(other) is other


@pytest.mark.parametrize(
    ("setting", "forced", "as_text"),
    [
        ("forced", True, True), ("forced", False, False), ("always", True, True),
        ("always", False, True), ("off", True, False), ("off", False, False),
    ],
)  # fmt: skip
def test_the_setting_says_for_which_answers(setting: str, forced: bool, as_text: bool) -> None:
    said = [HI, {"role": "tool", "content": "sun"}]
    offer = offered_tools(ChatFormats(None, "tags", setting), said, TOOLS, forced=forced)
    assert offer.formats.tools == ("llama_json" if as_text else None)
    assert offer.formats.thinking == "tags"
    assert offer.tools == (() if as_text else TOOLS)
    assert (offer.messages[0]["role"] == "system") is as_text
    assert (offer.messages[-1]["role"] == "tool") is (setting == "off")


@pytest.mark.parametrize("forced", [True, False])
def test_a_template_that_knows_tools_gets_them(forced: bool) -> None:
    chat, said = ChatFormats("hermes", None, "always"), [HI, {"role": "tool", "content": "sun"}]
    offer = offered_tools(chat, said, TOOLS, forced=forced)
    assert (offer.formats, offer.messages, offer.tools) == (chat, said, TOOLS)


def test_a_forced_call_has_a_grammar_and_no_tools_of_the_template() -> None:
    model = ModelInfo.from_row({**ROW, "chat": {"tools": None, "generic_tools": "forced"}})
    chat = ChatRequest("m", [HI], {"seed": 1}, "", tools=TOOLS[:1], forced=TOOLS[:1])
    choice = chat.choice(model)
    assert choice.chat == ChatFormats("llama_json", None, "forced") and choice.tools == TOOLS[:1]
    assert "tools" not in choice.arguments and choice.arguments["seed"] == 1
    assert '{\\"name\\": \\"weather\\"' in choice.arguments["format"]["grammar"]
    assert [message["role"] for message in choice.arguments["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("known", "advice"),
    [
        ({"tools": None}, "leave `tools` out$"),
        ({"tools": None, "generic_tools": "off"}, "leave `tools` out$"),
        ({"tools": None, "generic_tools": "forced"}, "or have a call forced by `tool_choice`$"),
        (None, "leave `tools` out$"),
    ],
)
def test_tools_without_force_are_refused(known: Any, advice: str) -> None:
    model = ModelInfo.from_row({**ROW, "chat": known})
    with pytest.raises(HttpError, match=advice):
        ChatRequest("m", [HI], {}, "", tools=TOOLS).choice(model)
