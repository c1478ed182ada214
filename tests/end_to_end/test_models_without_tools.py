"""Tools are refused by name where a model's template has no place for them, in every interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest
from support.pool import PATIENCE, Pool

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
HI: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
WITHOUT = ("demo", "counting")
SAID = "tools; leave `tools` out"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


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
    assert len(answer.ids) == 3  # whatever the seed is


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("model", WITHOUT)
def test_in_openais_interface(openais: openai.OpenAI, model: str, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openais.chat.completions.create(
            model=model, messages=HI, tools=TOOLS, tool_choice=choice, max_tokens=3
        )
    body: Any = refused.value.body
    assert body["param"] == "tools" and SAID in body["message"], body


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
    found = httpx.post(
        f"{url}/api/chat", json={**body, "options": {"temperature": 0}}, timeout=PATIENCE
    )
    (call,) = found.json()["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Lisbon"}
