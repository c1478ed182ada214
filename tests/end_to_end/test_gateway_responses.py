"""OpenAI's Responses API, called by its own client: the built-in model, and scripted answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.http_owners import openai_client
from support.openapi_answers import faults, unknown_members
from support.pool import PATIENCE, Pool
from support.scripted_gateway import Served

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

CONFIG = """
[models.small]
path = "builtin:counting"
context = 64
"""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": CITY}]
ASKED: Any = {"role": "user", "content": "What is the weather in Lisbon?"}
WEATHER = '{"temperature": 18, "sky": "cloudy"}'
SAID = "The weather in Lisbon: temperature 18, sky cloudy."
THINKER = {"tools": "hermes", "thinking": "tags"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Animal(BaseModel):
    """The schema of an answer."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=4)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    with (
        Pool(tmp_path_factory.mktemp("pool"), CONFIG) as pool,
        GatewayThread(pool.run_dir) as running,
    ):
        yield running


def told(line: str, seed: int, count: int) -> str:
    return text_of(expected_ids(line, seed, count))


# ---- whole answers -------------------------------------------------------------------------------


def test_an_answer_with_all_its_members(gateway: GatewayThread) -> None:
    body = {"model": "counting", "input": "hi", "max_output_tokens": 5, "seed": 7}
    more = {"metadata": {"run": "a"}, "instructions": "Count.", "user": "u", "temperature": 0.5}
    answer = httpx.post(
        f"{gateway.url}/v1/responses", json={**body, **more}, timeout=PATIENCE
    ).json()
    assert not faults(answer, "Response")
    assert not [*unknown_members(answer, {"$ref": "#/components/schemas/Response"})]
    prompt = "system: Count.\nuser: hi\n"
    (item,) = answer["output"]
    assert item["content"][0]["text"] == told(prompt, 7, 5) and item["status"] == "incomplete"
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["metadata"] == {"run": "a"} and answer["instructions"] == "Count."
    assert (answer["store"], answer["user"], answer["temperature"]) == (False, "u", 0.5)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (len(prompt), 5)


def test_cached_tokens_are_told(api: openai.OpenAI) -> None:
    for cached in (False, True):
        answer = api.responses.create(
            model="demo-chat", input="Say: it works, and so on", temperature=0
        )
        assert answer.usage is not None
        assert (answer.usage.input_tokens_details.cached_tokens > 5) is cached


def test_tools_in_two_rounds(api: openai.OpenAI) -> None:
    first = api.responses.create(
        model="demo-chat", input=[ASKED], tools=TOOLS, temperature=0, parallel_tool_calls=False
    )
    (call,) = first.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": "Lisbon"} and first.status == "completed"
    items: Any = [ASKED, call.model_dump(), output_of(call.call_id)]
    second = api.responses.create(model="demo-chat", input=items, tools=TOOLS, temperature=0)
    assert second.output_text == SAID


def output_of(call_id: str) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": WEATHER}


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"name": "get_weather"}]},
    ],
)
def test_a_call_can_be_forced_and_strict(api: openai.OpenAI, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": CITY}
    tools: Any = [{**TOOLS[0], "strict": True}, *([other] if choice != "required" else [])]
    answer = api.responses.create(
        model="demo-chat",
        input="Say: hi",
        tools=tools,
        tool_choice=choice,
        max_output_tokens=200,
        extra_body={"seed": 3},
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city"}


def test_the_client_parses_an_answer(api: openai.OpenAI) -> None:
    ask: Any = {
        "model": "demo-chat",
        "input": "An animal.",
        "text_format": Animal,
        "temperature": 0,
    }
    assert isinstance(api.responses.parse(**ask).output_parsed, Animal)
    with api.responses.stream(**ask) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Animal)
    answer = api.responses.create(
        model="demo-chat", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=50
    )
    assert answer.output_text.startswith("{")


def test_log_probabilities(api: openai.OpenAI) -> None:
    ask: Any = {"model": "counting", "input": "hi", "max_output_tokens": 3, "top_logprobs": 1}
    answer = api.responses.create(**ask, include=["message.output_text.logprobs"])
    (item,) = answer.output
    assert item.type == "message" and item.content[0].type == "output_text"
    entries = item.content[0].logprobs or []
    assert "".join(entry.token for entry in entries) == item.content[0].text
    assert entries[0].top_logprobs[0].token == entries[0].token


def test_thoughts_are_items_of_their_own(api: openai.OpenAI) -> None:
    ask: Any = {"model": "demo-chat", "input": "Who are you?", "temperature": 0}
    counts = set()
    for summary in (None, "auto"):
        answer = api.responses.create(**ask, reasoning={"effort": "low", "summary": summary})
        thoughts, said = answer.output
        assert thoughts.type == "reasoning" and said.type == "message"
        parts: Any = thoughts.content if summary is None else thoughts.summary
        assert parts[0].text == "The user asks what I am. I answer."
        assert answer.output_text.startswith("I am demo-chat")
        assert answer.usage is not None
        counts.add(answer.usage.output_tokens_details.reasoning_tokens)
        again: Any = [{"role": "user", "content": "Who are you?"}, *answer.to_dict()["output"]]
        again.append({"role": "user", "content": "Say: it works"})
        more = api.responses.create(model="demo-chat", input=again, temperature=0)
        assert more.output_text == "it works"
    (count,) = counts
    assert 5 < count < 20


# ---- streams -------------------------------------------------------------------------------------


def test_the_events_of_thoughts_a_text_and_a_call(served: Served) -> None:
    url = served.start(
        THINKER, "<think>A pl", "ace.</think>", "I look.", CALL[:30], CALL[30:], calls=1
    )
    with openai_client(url) as client:
        events = list(client.responses.create(model="m", input=[ASKED], tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    # Pieces that arrive together are one delta.
    assert [kind for kind, _ in groupby(kinds)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    for event in events:
        assert not faults(json.loads(event.to_json()), "ResponseEvent")
    last: Any = events[-1]
    kinds = [item.type for item in last.response.output]
    assert kinds == ["reasoning", "message", "function_call"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in last.response.output]
    assert last.response.usage.output_tokens_details.reasoning_tokens == 2


def test_a_worker_that_is_lost_fails_the_response(served: Served) -> None:
    url = served.start(THINKER, "Hm", reason=None)
    with openai_client(url) as client:
        events = list(client.responses.create(model="m", input=[ASKED], stream=True))
    last: Any = events[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert "ended" in last.response.error.message


# ---- the context ---------------------------------------------------------------------------------


def test_a_conversation_that_is_too_long(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the context is 64") as caught:
        api.responses.create(model="small", input="x" * 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_old_items_are_left_out_with_truncation(api: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": f"{number}" * 20} for number in range(5)]
    answer = api.responses.create(
        model="small", instructions="Be.", input=said, truncation="auto", extra_body={"seed": 7},
        max_output_tokens=2,
    )  # fmt: skip
    prompt = f"system: Be.\nuser: {'4' * 20}\n"
    longer = f"system: Be.\nuser: {'3' * 20}\nuser: {'4' * 20}\n"
    kept = prompt if len(longer) >= 64 else longer
    assert answer.usage is not None and answer.usage.input_tokens == len(kept)
    assert answer.output_text == told(kept, 7, 2)
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="small", input="x" * 100, truncation="auto")
    assert caught.value.code == "context_length_exceeded"


# ---- refused requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"background": True}, "background", ""),
        ({"store": True}, "store", "nothing is kept"),
        ({"bogus": 1}, "bogus", "unknown field"),
    ],
)
def test_what_cannot_be_is_named(
    api: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="demo-chat", input="x", extra_body=fields)
    assert caught.value.param == param and words in caught.value.message


def test_thoughts_and_images_of_a_model_without(api: openai.OpenAI) -> None:
    effort: Any = {"effort": "low"}  # programs send an effort to every model
    api.responses.create(model="counting", input="x", reasoning=effort, max_output_tokens=1)
    url = f"data:image/png;base64,{base64.b64encode(b'x').decode()}"
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    item: Any = {"role": "user", "content": [part]}
    with pytest.raises(openai.BadRequestError, match="image"):
        api.responses.create(model="counting", input=[item])
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="nobody", input="x")
    with pytest.raises(openai.InternalServerError, match="nothing is kept") as refused:
        api.responses.retrieve("resp_1")
    assert refused.value.status_code == 501
