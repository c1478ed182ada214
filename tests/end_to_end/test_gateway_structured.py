"""Formats of answers in the interfaces of OpenAI, vLLM and Ollama, by their own clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import ollama
import openai
import pytest
from pydantic import BaseModel, Field

from support.constrained_answers import demo
from support.gateway_thread import GatewayThread
from support.pool import Pool
from support.worker_checkpoints import write_checkpoint

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

# A bias for `}`, strong enough that the model ends an object although it may add members.
END = {str(demo()[1].encode("}")[-1]): 100}
HI: Any = [{"role": "user", "content": "Describe a person."}]
TOOL = {"type": "function", "function": {"name": "f"}}


# Chat templates of models with random weights; each template shows the model's format of calls.
TEMPLATES = {
    "hermes": "{{ tools and '<tool_call>' }}{{ messages[0].content }}",
    "llama": "{{ tools and '<|python_tag|>' }}{{ messages[0].content }}",
    "glm": "{{ tools and '<arg_key>' }}{{ messages[0].content }}",
    "xml": "{{ tools and '<function=' }}{{ messages[0].content }}",
    "mistral": "{{ tools and '[TOOL_CALLS]' }}{{ messages[0].content }}",
    "harmony": "{{ tools and '<|channel|>' }}{{ messages[0].content }}",
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "hotel")
]


class Pet(BaseModel):
    """A nested model, so that the schema has $defs."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=4)


class Person(BaseModel):
    """The schema of an answer."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    pets: list[Pet] = Field(max_length=2)
    married: bool | None


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    root = tmp_path_factory.mktemp("models")
    for name, template in TEMPLATES.items():
        write_checkpoint(root / name, tokenizer_config={"chat_template": template})
    tables = [f'[models.{name}]\npath = "{root / name}"' for name in TEMPLATES]
    with (
        Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as pool,
        GatewayThread(pool.run_dir) as running,
    ):
        yield running


def chat(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(model="demo", messages=HI, seed=3, **fields)
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


def test_openais_client_parses_an_answer(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model="demo", messages=HI, response_format=Person, seed=5, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_openais_client_parses_a_stream(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model="demo", messages=HI, response_format=Person, seed=6, max_tokens=200
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person)


def test_json_object_and_text(api: openai.OpenAI) -> None:
    assert chat(api, response_format={"type": "json_object"}, logit_bias=END) == "{}"
    api.chat.completions.create(
        model="demo", messages=HI, response_format={"type": "text"}, max_tokens=2
    )


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, "[a-c]{4}"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a|b"),
        ({"structured_outputs": {"json_object": True}}, r"\{\}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
    ],
)
def test_fields_of_vllm(api: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, chat(api, extra_body=extra, logit_bias=END))
    answer = api.completions.create(
        model="demo", prompt="x = ", extra_body=extra, max_tokens=9, logit_bias={**END}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            None,
            'Unimplemented keys: ["not"]',
        ),
    ],
)
def test_what_cannot_be_is_named(
    api: openai.OpenAI, fields: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="demo", messages=HI, extra_body=fields)
    assert caught.value.param == param and words in caught.value.message


def test_ollamas_client_with_a_schema(gateway: GatewayThread) -> None:
    with ollama.Client(host=gateway.url) as client:
        options = {"seed": 4, "num_predict": 200}
        answer = client.chat("demo", HI, format=Person.model_json_schema(), options=options)
        Person.model_validate_json(answer.message.content or "")
        options = {"seed": 4, "num_predict": 5}
        text = client.generate("demo", "x = ", format="json", options=options)
        assert text.response.startswith("{") and text.done_reason in ("stop", "length")
        with pytest.raises(ollama.ResponseError, match="uniqueItems"):
            client.generate("demo", "x", format={"type": "array", "uniqueItems": True})


@pytest.mark.parametrize("model", ["hermes", "llama", "glm", "xml", "mistral", "demo-chat"])
def test_a_call_can_be_forced(api: openai.OpenAI, model: str) -> None:
    named = {"type": "function", "function": {"name": "hotel"}}
    cases: Any = (("required", {"weather", "hotel"}), (named, {"hotel"}))
    for choice, names in cases:
        answer = api.chat.completions.create(
            model=model, messages=HI, tools=TOOLS, tool_choice=choice, seed=3
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        calls = answer.choices[0].message.tool_calls
        assert calls is not None and len(calls) == 1
        (call,) = calls
        assert call.type == "function" and call.function.name in names
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city", "days"} and arguments["city"] in ("Paris", "Rome")


@pytest.mark.parametrize(
    ("model", "choice", "param"),
    [
        ("harmony", "required", "tool_choice"),
        ("hermes", {"type": "function", "function": {"name": "taxi"}}, "tool_choice"),
        ("hermes", {"name": "taxi"}, "tool_choice"),
        ("mistral", "auto", "tools[0].function.strict"),
        ("harmony", "auto", "tools[0].function.strict"),
    ],
)
def test_a_call_that_cannot_be_forced(
    api: openai.OpenAI, model: str, choice: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(
            model=model, messages=HI, tools=TOOLS, tool_choice=choice, seed=3
        )
    assert caught.value.param == param


def test_strict_calls_are_left_to_the_model(api: openai.OpenAI) -> None:
    """The model may answer with text, or with a call, whose arguments must follow the schema."""
    cities = ["Lisbon", "Rome"]
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": cities}},
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "parameters": parameters, "strict": True}
    tools: Any = [{"type": "function", "function": function}]

    def ask(words: str) -> Any:
        return api.chat.completions.create(
            model="demo-chat",
            messages=[{"role": "user", "content": words}],
            tools=tools,
            temperature=0,
        ).choices[0]

    for words in ("What is the weather in Lisbon?", "What is the weather in Paris?"):
        choice = ask(words)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in cities
    choice = ask("Who are you?")
    assert (
        choice.finish_reason == "stop" and choice.message.content and not choice.message.tool_calls
    )
