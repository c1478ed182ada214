"""Tools for models whose chat template does not support tools, in every interface.

Forced calls work, and with the setting `always` all calls do. Otherwise a request with tools is
refused, and the error names `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest
from support.pool import PATIENCE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": CITY,
        },
    }
]
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Porto"]}},
    "required": ["city"],
    "additionalProperties": False,
}
HI: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
WITHOUT = ("demo", "counting")
SAID = "tools; leave `tools` out"
CONFIG = '[models.always]\npath = "builtin:demo"\ngeneric_tools = "always"'


@pytest.fixture
def openais(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("demo", "the chat template of this model has no place for tools: leave `tools` out"),
        ("counting", "the model counting knows no tools: leave `tools` out"),
    ],
)
def test_natively(client: Client, model: str, said: str) -> None:
    for ask in (
        lambda: client.generate(model, messages=HI, tools=TOOLS, max_tokens=3),
        lambda: client.tokenize_chat(model, HI, tools=TOOLS),
    ):
        with pytest.raises(BadRequest) as refused:
            ask()
        assert refused.value.message == said
    answer = client.generate(model, messages=HI, tools=[], max_tokens=3, ignore_eos=True)
    assert len(answer.ids) == 3  # 3 ids for every seed, because of `ignore_eos`


@pytest.mark.parametrize(
    ("model", "choice"),
    # The counting model cannot use a grammar, so it also refuses `required`.
    [("demo", "auto"), ("counting", "auto"), ("counting", "required")],
)
def test_in_openais_interface(openais: openai.OpenAI, model: str, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openais.chat.completions.create(
            model=model, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=3
        )
    body: Any = refused.value.body
    assert body["param"] == "tools" and SAID in body["message"], body


def forced(interface: str, *, stream: bool) -> dict[str, Any]:
    """Returns a request that forces a call."""
    of_chat = {"name": "get_weather", "description": "Of a city.", "parameters": PLACE}
    tool: dict[str, Any] = {"type": "function", "function": of_chat}
    body: dict[str, Any] = {"model": "demo", "messages": HI, "stream": stream, "temperature": 0}
    if interface == "responses":
        del body["messages"]
        tool = {"type": "function", **of_chat}
        choice: Any = {"type": "function", "name": "get_weather"}
        body |= {"input": HI, "store": False}
    elif interface == "messages":
        tool = {"name": "get_weather", "input_schema": PLACE}
        choice = {"type": "any"}
        body["max_tokens"] = 60
    else:
        choice = "required"
    return {**body, "tools": [tool], "tool_choice": choice}


def call_of(interface: str, body: Any) -> tuple[str, Any]:
    """Returns the name and the arguments of the one call of an answer."""
    if interface == "responses":
        (call,) = body["output"]
        return call["name"], json.loads(call["arguments"])
    if interface == "messages":
        (call,) = body["content"]
        return call["name"], call["input"]
    (call,) = body["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("interface", "streams"),
    [
        ("chat/completions", '"finish_reason":"tool_calls"'),
        ("responses", "response.function_call_arguments.done"),
        ("messages", '"type":"tool_use"'),
    ],
)
def test_a_forced_call(url: str, interface: str, streams: str) -> None:
    asked = forced(interface, stream=False)
    answer = httpx.post(f"{url}/v1/{interface}", json=asked, timeout=PATIENCE)
    name, arguments = call_of(interface, answer.json())
    assert name == "get_weather" and arguments["city"] in ("Lisbon", "Porto")
    asked = forced(interface, stream=True)
    streamed = httpx.post(f"{url}/v1/{interface}", json=asked, timeout=PATIENCE).text
    assert "get_weather" in streamed and streams in streamed.replace('": "', '":"')


def test_tokens_of_tools_as_text_are_counted(url: str) -> None:
    asked = forced("messages", stream=False)
    answer = httpx.post(f"{url}/v1/messages", json=asked, timeout=PATIENCE).json()
    counted = {key: asked[key] for key in ("model", "messages", "tools", "tool_choice")}
    count = httpx.post(f"{url}/v1/messages/count_tokens", json=counted, timeout=PATIENCE).json()
    usage = answer["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"] > 100


def test_the_setting_always_takes_tools_without_force(url: str) -> None:
    body: dict[str, Any] = {"model": "always", "messages": HI, "tools": TOOLS, "stream": False}
    body["options"] = {"num_predict": 3}
    answer = httpx.post(f"{url}/api/chat", json=body, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.json()["prompt_eval_count"] > 100
    shown = httpx.post(f"{url}/api/show", json={"model": "always"}, timeout=PATIENCE).json()
    assert "tools" in shown["capabilities"]


@pytest.mark.parametrize("model", WITHOUT)
def test_tools_that_must_not_be_called_are_no_reason(openais: openai.OpenAI, model: str) -> None:
    answer = openais.chat.completions.create(
        model=model, messages=HI, tools=TOOLS, tool_choice="none", max_tokens=3, temperature=0
    )
    assert answer.usage is not None and answer.usage.completion_tokens > 0
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize("model", WITHOUT)
def test_in_ollamas_interface(url: str, model: str) -> None:
    body = {"model": model, "messages": HI, "tools": TOOLS}
    refused = httpx.post(f"{url}/api/chat", json=body, timeout=PATIENCE)
    assert refused.status_code == 400 and "does not support tools" in refused.json()["error"]
    shown = httpx.post(f"{url}/api/show", json={"model": model}, timeout=PATIENCE).json()
    assert "tools" not in shown["capabilities"]


def test_a_model_that_knows_tools_takes_them_everywhere(
    url: str, client: Client, openais: openai.OpenAI
) -> None:
    result = client.generate("demo-chat", messages=HI, tools=TOOLS, temperature=0)
    assert '"name": "get_weather"' in result.text
    answer = openais.chat.completions.create(
        model="demo-chat", messages=HI, tools=TOOLS, temperature=0
    )
    assert answer.choices[0].message.tool_calls
    body = {"model": "demo-chat", "messages": HI, "tools": TOOLS, "stream": False}
    response = httpx.post(
        f"{url}/api/chat", json={**body, "options": {"temperature": 0}}, timeout=PATIENCE
    )
    (call,) = response.json()["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Lisbon"}
