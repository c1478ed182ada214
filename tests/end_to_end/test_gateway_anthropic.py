"""Anthropic's Messages API, called by its own client: the built-in model, and scripted answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from mlxpool.common.protocol.chat import INVALID_JSON
from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.openapi_answers import faults, unknown_members
from support.pool import PATIENCE, Pool
from support.scripted_gateway import Served
from support.secret_file import secret_file

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

CONFIG = """
[models.small]
path = "builtin:counting"
context = 64
"""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "get_weather", "input_schema": CITY}]
ASKED: Any = {"role": "user", "content": "What is the weather in Lisbon?"}
WEATHER = '{"temperature": 18, "sky": "cloudy"}'
SAID = "The weather in Lisbon: temperature 18, sky cloudy."
HI: Any = [{"role": "user", "content": "hi"}]
LINE = "user: hi\n"  # the counting model's prompt for it
THINKER = {"tools": "hermes", "thinking": "tags"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
COLD = {"temperature": 0}
KEY = "0123456789abcdef"


@pytest.fixture
def client(gateway: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with client_of(gateway.url) as new_client:
        yield new_client


def client_of(url: str, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def told(seed: int, count: int) -> str:
    return text_of(expected_ids(LINE, seed, count))


# ---- whole answers -------------------------------------------------------------------------------


def test_an_answer_with_all_its_members(gateway: GatewayThread) -> None:
    body = {"model": "counting", "messages": HI, "max_tokens": 5, "seed": 7}
    headers = {"x-request-id": "mine", "anthropic-version": "2023-06-01"}
    response = httpx.post(
        f"{gateway.url}/v1/messages", json=body, headers=headers, timeout=PATIENCE
    )
    answer = response.json()
    assert not faults(answer, "AnthropicMessage")
    assert not [*unknown_members(answer, {"$ref": "#/components/schemas/AnthropicMessage"})]
    assert answer["content"] == [{"type": "text", "text": told(7, 5), "citations": None}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert answer["usage"]["input_tokens"] == len(LINE) and answer["usage"]["output_tokens"] == 5
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"


def test_tools_in_two_rounds(client: anthropic.Anthropic) -> None:
    ask: Any = {
        "model": "demo-chat", "max_tokens": 200, "tools": TOOLS, "extra_body": COLD,
        "system": [{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}],
    }  # fmt: skip
    first = client.messages.create(
        **ask, messages=[ASKED], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    (call,) = first.content
    assert (
        call.type == "tool_use" and call.name == "get_weather" and call.input == {"city": "Lisbon"}
    )
    assert first.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    messages: Any = [ASKED, {"role": "assistant", "content": first.content}]
    second = client.messages.create(
        **ask, messages=[*messages, {"role": "user", "content": [result]}]
    )
    (said,) = second.content
    assert said.type == "text" and said.text == SAID and second.stop_reason == "end_turn"
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens > 30
    with client.messages.stream(**ask, messages=[ASKED]) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and final.content[0].input == {"city": "Lisbon"}
    assert final.stop_reason == "tool_use"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_forced(client: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [{**TOOLS[0], "strict": True, "type": "custom", "description": "The weather."}]
    message = client.messages.create(
        model="demo-chat", max_tokens=200, messages=HI, tools=tools, tool_choice=choice,
        extra_body={"seed": 3},
    )  # fmt: skip
    (call,) = message.content
    assert call.type == "tool_use" and set(call.input) == {"city"}


def test_thoughts_are_blocks_of_their_own(client: anthropic.Anthropic) -> None:
    ask: Any = {"model": "demo-chat", "max_tokens": 200, "extra_body": COLD}
    who: Any = [{"role": "user", "content": "Who are you?"}]
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**ask, messages=who, thinking=enabled)
    thoughts, said = message.content
    assert thoughts.type == "thinking" and said.type == "text"
    assert thoughts.thinking == "The user asks what I am. I answer."
    assert message.usage.output_tokens_details is not None
    assert 5 < message.usage.output_tokens_details.thinking_tokens < 20
    again = [*who, {"role": "assistant", "content": message.content}]
    more = client.messages.create(
        **ask, messages=[*again, {"role": "user", "content": "Say: it works"}]
    )
    assert more.content[0].type == "text" and more.content[0].text == "it works"
    hides: Any = {**enabled, "display": "omitted"}
    hidden = client.messages.create(**ask, messages=who, thinking=hides)
    assert hidden.content[0].type == "thinking" and hidden.content[0].thinking == ""
    with client.messages.stream(**ask, messages=who, thinking=enabled) as stream:
        final = stream.get_final_message()
    assert final.content[0].to_dict() == thoughts.to_dict()
    assert final.usage.output_tokens == message.usage.output_tokens


def test_an_answer_with_a_schema(client: anthropic.Anthropic) -> None:
    format: Any = {
        "type": "json_schema",
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    }
    message = client.messages.create(
        model="demo-chat", max_tokens=50, messages=HI, output_config={"format": format}
    )
    assert message.content[0].type == "text"
    assert message.content[0].text.replace(" ", "") in ('{"ok":true}', '{"ok":false}')


def test_why_an_answer_ends(client: anthropic.Anthropic) -> None:
    words = told(7, 4).split(" ")
    ask: Any = {"messages": HI, "max_tokens": 99, "extra_body": {"seed": 7}}
    stops = ["never", f" {words[2]}"]
    message = client.messages.create(model="counting", stop_sequences=stops, **ask)
    assert message.content[0].type == "text" and message.content[0].text == " ".join(words[:2])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stops[1])
    with client.messages.stream(model="counting", stop_sequences=stops, **ask) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stops[1])
    message = client.messages.create(model="small", **ask)
    assert message.stop_reason == "model_context_window_exceeded"
    assert message.usage.output_tokens == 64 - len(LINE)


# ---- streams -------------------------------------------------------------------------------------


def test_the_events_of_thoughts_a_text_and_a_call(served: Served) -> None:
    url = served.start(THINKER, "<think>A place.</think>", "I look.", CALL[:40], CALL[40:], calls=1)
    with client_of(url) as client:
        events = list(
            client.messages.create(
                model="m", max_tokens=99, messages=[ASKED], tools=TOOLS, stream=True
            )
        )
    kinds = [(event.type, getattr(getattr(event, "delta", None), "type", None)) for event in events]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert kinds == [
        ("message_start", None),
        (start, None), (delta, "thinking_delta"), (delta, "signature_delta"), (stop, None),
        (start, None), (delta, "text_delta"), (stop, None),
        (start, None), *[(delta, "input_json_delta")] * (len(kinds) - 12), (stop, None),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    for event in events:
        assert not faults(event.to_dict(), "AnthropicEvent")
    first, last = events[0], events[-2]
    assert first.type == "message_start" and first.message.usage.input_tokens == 3
    assert last.type == "message_delta" and last.delta.stop_reason == "tool_use"
    assert last.usage.output_tokens == 4


def test_a_worker_that_is_lost_ends_the_stream_with_an_error(served: Served) -> None:
    url = served.start(THINKER, "Hm", reason=None)
    with (
        client_of(url) as client,
        pytest.raises(anthropic.APIStatusError, match="the worker ended") as caught,
        client.messages.stream(model="m", max_tokens=9, messages=[ASKED]) as stream,
    ):
        stream.until_done()
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


def final(client: anthropic.Anthropic, *, stream: bool, tools: Any = TOOLS) -> Any:
    ask: Any = {"model": "m", "max_tokens": 99, "messages": [ASKED], "tools": tools}
    if not stream:
        return client.messages.create(**ask)
    with client.messages.stream(**ask) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", ["5", '{"city": Paris}', '{"city": "Paris",}'])
def test_arguments_that_are_no_map_are_told_as_text(
    served: Served, stream: bool, broken: str
) -> None:
    url = served.start(THINKER, CALL.replace('{"city": "Paris"}', broken))
    with client_of(url) as client:
        message = final(client, stream=stream)
        (call,) = message.content
        assert (call.type, call.input) == ("tool_use", {INVALID_JSON: broken})
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_has_no_arguments(served: Served, stream: bool) -> None:
    url = served.start(THINKER, CALL[:60], reason="length")
    with client_of(url) as client:
        message = final(client, stream=stream)
    (call,) = message.content
    assert call.type == "tool_use" and call.input == {} and message.stop_reason != "tool_use"


# ---- tokens, keys, errors ------------------------------------------------------------------------


def test_tokens_are_counted_as_the_prompt_has_them(client: anthropic.Anthropic) -> None:
    ask: Any = {"model": "demo-chat", "messages": [ASKED], "tools": TOOLS, "system": "Be short."}
    count = client.messages.count_tokens(**ask).input_tokens
    usage = client.messages.create(**ask, max_tokens=1).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(client: anthropic.Anthropic) -> None:
    assert "small" in {model.id for model in client.models.list()}
    model = client.models.retrieve("small")
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", "small", 64)


def test_a_key_in_x_api_key(pool: Pool, tmp_path: Path) -> None:
    file = secret_file(tmp_path / "keys", f"alice {KEY}\n")
    with GatewayThread(pool.run_dir, keys=file) as gateway:
        with client_of(gateway.url, KEY) as client:
            assert client.messages.count_tokens(model="counting", messages=HI).input_tokens
        with (
            client_of(gateway.url, "wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(model="counting", max_tokens=1, messages=HI)
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"
    assert body["request_id"] == caught.value.request_id


def test_a_conversation_that_is_too_long(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="small", max_tokens=1, messages=long)
    body: Any = caught.value.body
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 107 tokens > 63 maximum",
    }
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.stream(model="small", max_tokens=1, messages=long).__enter__()


def test_errors_have_the_types_of_the_interface(
    client: anthropic.Anthropic, gateway: GatewayThread
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'nobody'") as caught:
        client.messages.create(model="nobody", max_tokens=1, messages=HI)
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"
    response = httpx.get(f"{gateway.url}/v1/messages", timeout=PATIENCE)
    assert response.status_code == 405 and not faults(response.json(), "AnthropicError")
    response = httpx.post(f"{gateway.url}/v1/messages", content="{", timeout=PATIENCE)
    assert response.status_code in (400, 415) and not faults(response.json(), "AnthropicError")


def said(*blocks: dict[str, Any], role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": list(blocks)}]


CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


CALLED = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def test_thoughts_of_a_model_without(client: anthropic.Anthropic) -> None:
    ask: Any = {"model": "counting", "max_tokens": 1, "messages": HI}
    client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
    client.messages.create(**ask, thinking={"type": "adaptive"}, output_config={"effort": "high"})
