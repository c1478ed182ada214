"""Tool calls and thoughts through the gateway; a scripted broker sends a trained model's text."""

from __future__ import annotations

import json
from typing import Any

import ollama
import pytest

from mlxpool.common.protocol.chat import INVALID_JSON
from support.http_owners import openai_client
from support.scripted_gateway import Served

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
HI: Any = [{"role": "user", "content": "Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THINKER = {"tools": "hermes", "thinking": "tags"}
BROKEN = '{"city": Paris}'
CHANNELS = {"tools": "harmony", "thinking": "harmony"}


def test_a_call_and_thoughts_in_a_whole_answer(served: Served) -> None:
    url = served.start(THINKER, "A place.\n</thi", f"nk>\n\nI look.\n{CALL}", thinks=True)
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    assert getattr(choice.message, "reasoning_content", None) == "A place."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and len(call.id) == 9
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
    assert served.asked["tools"] == TOOLS and served.asked["messages"] == HI


def test_a_call_in_a_stream(served: Served) -> None:
    url = served.start(THINKER, *CALL)
    names, ids, arguments, reasons = [], set(), "", []
    with openai_client(url) as client:
        stream = client.chat.completions.create(
            model="m", messages=HI, tools=TOOLS, stream=True, reasoning_effort="none"
        )
        for chunk in stream:
            (choice,) = chunk.choices
            reasons.append(choice.finish_reason)
            assert not choice.delta.content
            for part in choice.delta.tool_calls or []:
                assert part.index == 0 and part.function is not None
                ids.add(part.id)
                names.append(part.function.name)
                arguments += part.function.arguments or ""
    assert [name for name in names if name] == ["weather"] and len(ids - {None}) == 1
    assert json.loads(arguments) == {"city": "Paris"} and reasons[-1] == "tool_calls"
    assert served.asked["think"] is False


def test_only_one_call_without_parallel_calls(served: Served) -> None:
    url = served.start(THINKER, "I look. ", *CALL, " ", CALL, "So.")
    with openai_client(url) as client:
        answer = client.chat.completions.create(
            model="m", messages=HI, tools=TOOLS, parallel_tool_calls=False
        )
    (choice,) = answer.choices
    assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_stops_within_a_call_has_none(served: Served, stream: bool) -> None:
    cut = CALL[: CALL.index("Paris")]
    url = served.start(THINKER, "I look. ", *cut)
    with openai_client(url) as client:
        answer: Any = client.chat.completions.create(
            model="m", messages=HI, tools=TOOLS, stop=["Paris"], stream=stream
        )
        choices = [part.choices[0] for part in (answer if stream else [answer])]
    messages = [choice.delta if stream else choice.message for choice in choices]
    assert "".join(message.content or "" for message in messages) == "I look."
    assert (
        not any(message.tool_calls for message in messages) and choices[-1].finish_reason == "stop"
    )
    assert served.asked["options"]["stop"] == ["Paris"]


def test_harmony_channels(served: Served) -> None:
    url = served.start(
        CHANNELS,
        "<|channel|>analysis<|message|>Hm",
        ".<|end|><|start|>assistant<|channel|>final<|mess",
        "age|>Yes.",
    )
    with openai_client(url) as client:
        (choice,) = client.chat.completions.create(
            model="m", messages=HI, reasoning_effort="low"
        ).choices
    assert (choice.message.content, choice.finish_reason) == ("Yes.", "stop")
    assert getattr(choice.message, "reasoning_content", None) == "Hm."
    assert served.asked["think"] == "low" and "tools" not in served.asked


def test_thoughts_are_sent_to_a_harmony_template_in_its_form(served: Served) -> None:
    url = served.start(CHANNELS, "<|channel|>final<|message|>Warm.")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said: Any = {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."}
    result: Any = {"role": "tool", "tool_call_id": "a", "content": "18"}
    with openai_client(url) as client:
        client.chat.completions.create(model="m", messages=[*HI, said, result], tools=TOOLS)
    assert served.asked["messages"][1]["thinking"] == "Hm."


def test_tools_are_dropped_with_tool_choice_none(served: Served) -> None:
    url = served.start(THINKER, CALL)
    with openai_client(url) as client:
        answer = client.chat.completions.create(
            model="m", messages=HI, tools=TOOLS, tool_choice="none"
        )
    assert answer.choices[0].message.content == CALL and "tools" not in served.asked


def test_a_call_through_ollamas_client(served: Served) -> None:
    url = served.start(THINKER, "<think>Hm.</think>", CALL[:20], CALL[20:])
    with ollama.Client(host=url) as client:
        parts = list(client.chat("m", HI, tools=TOOLS, think="high", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    (call,) = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert not any(part.message.content for part in parts) and parts[-1].done_reason == "stop"
    assert served.asked["think"] is True  # thinking between tags has no levels


def test_earlier_calls_and_answers_reach_the_template(served: Served) -> None:
    url = served.start(THINKER, "Fine.")
    call = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "18 degrees"},
    ]
    with ollama.Client(host=url) as client:
        assert client.chat("m", messages).message.content == "Fine."
    _, said, result = served.asked["messages"]
    assert said["reasoning_content"] == "Hm." and said["tool_calls"] == [call]
    assert result["name"] == "weather" and result["role"] == "tool"


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_map_reach_ollamas_client(served: Served, stream: bool) -> None:
    url = served.start(THINKER, CALL.replace('{"city": "Paris"}', BROKEN))
    with ollama.Client(host=url) as client:
        answer: Any = client.chat("m", HI, tools=TOOLS, stream=stream)
        parts = list(answer) if stream else [answer]
        (call,) = [call for part in parts for call in part.message.tool_calls or []]
        assert call.function.arguments == {INVALID_JSON: BROKEN}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_ends_ollamas_answer_as_length(served: Served, stream: bool) -> None:
    url = served.start(THINKER, CALL[:60], reason="length")
    with ollama.Client(host=url) as client:
        answer: Any = client.chat("m", HI, tools=TOOLS, stream=stream)
        parts = list(answer) if stream else [answer]
    assert parts[-1].done_reason == "length"
    assert not any(part.message.tool_calls for part in parts)


def test_openais_client_gets_the_arguments_as_they_are(served: Served) -> None:
    url = served.start(THINKER, CALL.replace('{"city": "Paris"}', BROKEN))
    with openai_client(url) as client:
        answer = client.chat.completions.create(model="m", messages=HI, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.arguments == BROKEN


def test_a_call_that_openais_client_sends_back_reaches_the_template(served: Served) -> None:
    url = served.start(THINKER, "Fine.")
    call: Any = {"id": "c", "type": "function"}
    call["function"] = {"name": "weather", "arguments": BROKEN}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}]
    with openai_client(url) as client:
        client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    said = served.asked["messages"][1]["tool_calls"][0]["function"]
    assert said["arguments"] == {INVALID_JSON: BROKEN}
