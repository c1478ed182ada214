"""openapi.json: valid, with every route and field, and as permissive as the parsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from mlxpool.client import AsyncClient
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.jobs.requests import OF_CALLS
from mlxpool.gateway.ollama import fields as ollama_fields
from mlxpool.gateway.openapi import document
from mlxpool.gateway.route_table import NOT_BUILT, ROUTES
from mlxpool.gateway.settings import Settings
from support.gateway_parsers import (
    CHAT,
    GENERATE,
    HI,
    OLLAMA,
    PARSERS,
    RESPONSES,
    TEXT,
)
from support.openapi_answers import validator

TOOL = {"type": "function", "function": {"name": "f"}}
DOCUMENT = document(ROUTES, "1.2", keys=True)
# path -> fields added to the smallest body, so that other fields have a meaning
BESIDE: Mapping[str, dict[str, Any]] = {
    CHAT: {"stream": True, "logprobs": True},
    TEXT: {"stream": True},
    RESPONSES: {"stream": True, "include": ["message.output_text.logprobs"]},
    GENERATE: {"logprobs": True},
    OLLAMA: {"logprobs": True},
}
SAMPLES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 5, 21, 33, 2**31, 2**64, -(2**32), 0.5, -0.5, 2.5, 1e9 + 0.5,
    "", "x", "auto", "none", "low", "float", "text", "x" * 300, "x" * 1025,
    [], [""], ["x"], ["x", "y"], [0], [1, 2], [-1], [2**32], [[1, 2]], [[]], [True], [None],
    {}, {"x": 1}, {"1": 0.5}, {"1": 101}, {"type": "text"}, [{}], ["text"], [{"text": "x"}],
    HI, [{"role": "pope", "content": "x"}], [TOOL], [{"type": "web"}], ["x"] * 65, ["y"] * 33,
    {"include_usage": True}, {"include_usage": 1}, {"enable_thinking": True}, {"temperature": 0.5},
    {"temperature": -1}, {"num_thread": 3}, {"mirostat": 0}, {"mirostat": 2}, {"bogus": 1},
)  # fmt: skip
# Values whose validity a schema cannot express: another field, or the text itself, decides.
UNSAID: Mapping[str, tuple[Any, ...]] = {
    "best_of": (5, 21, 33),  # not with stream, and at least n
    "max_tokens": (0,),  # with echo or prompt_logprobs
    "prompt_logprobs": (0, 1, 5),  # not with stream
    "logprobs": (None, False),  # without it top_logprobs has no use
    "text_1": (["x", "y"], ["x"] * 65, ["y"] * 33),  # the same number as text_2
    "keep_alive": ("x", "auto", "none", "low", "float", "text", "", "x" * 300, "x" * 1025),
    "guided_json": ("x", "auto", "none", "low", "float", "text", "", "x" * 300, "x" * 1025),
    "images": (["x"], ["x", "y"], [""], ["text"], ["x"] * 65, ["y"] * 33),  # not base64
    "raw": (True,),
    "name": ("",),  # beside a model
    "add_generation_prompt": (False,),  # with continue_message only
    "continue_message": (True,),  # after a message of the assistant
    "continue_final_message": (True,),
    "model": (None,),  # `name` may replace it
    "/v1/jobs prompt": (None,),  # one of three prompts, and fields that need messages
    "/v1/jobs messages": (
        [{}],
        [{"text": "x"}],
        HI,
        [{"role": "pope", "content": "x"}],
        [TOOL],
        [{"type": "web"}],
    ),
    "/v1/responses input": ([TOOL], [{"type": "web"}]),  # no message would be left
    "/v1/jobs tokens": ([0], [1, 2], [[1, 2]]),
    **{f"/v1/jobs {name}": SAMPLES for name in OF_CALLS},  # these fields need the kind of a call
    "/v1/jobs think": (True, False, "low"),
    "/v1/jobs tools": (
        [{}],
        [{"text": "x"}],
        HI,
        [{"role": "pope", "content": "x"}],
        [TOOL],
        [{"type": "web"}],
    ),
    "/tokenize prompt": (None,),  # `messages` may replace it
    "/tokenize messages": (HI,),  # messages exclude a prompt
}


def test_it_is_valid() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"] == "3.1.0" and DOCUMENT["info"]["version"] == "1.2"
    validate(document(ROUTES, "1.2", keys=False))


def test_every_route_that_is_served_is_in_it(tmp_path: Path) -> None:
    settings = Settings(run_dir=tmp_path)
    served = {
        re.sub(":path}", "}", route.path)
        for route in Gateway(settings).routes(PoolAccess(settings, AsyncClient(tmp_path)))
    }
    assert served - {*NOT_BUILT, "/{path}"} == set(DOCUMENT["paths"])
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
    ids = [each["operationId"] for path in DOCUMENT["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids) == len(ROUTES)


def test_keys_are_needed_but_for_public_routes() -> None:
    for route in ROUTES:
        security = DOCUMENT["paths"][route.shown_path][route.method.lower()]["security"]
        assert security == ([] if route.public else [{"key": []}])


def test_every_field_is_in_it() -> None:
    bodies = {route.path: route.body for route in ROUTES if route.body is not None}
    assert set(PARSERS) == set(bodies)
    for path, (_, body, _) in PARSERS.items():
        assert bodies[path] is body, path
        operation = DOCUMENT["paths"][path]["post"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = DOCUMENT["components"]["schemas"][name.rpartition("/")[2]]
        assert set(schema["properties"]) == body.names
        assert schema["additionalProperties"] is body.open
    options = DOCUMENT["components"]["schemas"]["post_api_chat_request"]["properties"]["options"]
    assert set(options["properties"]) == ollama_fields.GENERATION_OPTIONS.names


@pytest.mark.parametrize("path", PARSERS)
def test_a_field_is_taken_by_the_parser_if_and_only_if_its_schema_takes_it(path: str) -> None:
    parse, body, least = PARSERS[path]
    base = {**least, **BESIDE.get(path, {})}
    check = validator(body.schema())
    assert check.is_valid(base) and parse(base)
    wrong = []
    for name in sorted(body.names):
        unsaid = (*UNSAID.get(name, ()), *UNSAID.get(f"{path} {name}", ()))
        for value in SAMPLES:
            if any(value == entry and type(value) is type(entry) for entry in unsaid):
                continue
            whole = {**base, name: value}
            if _taken(parse, whole) != check.is_valid(whole):
                wrong.append((name, value, "only by its schema" if check.is_valid(whole) else ""))
    assert not wrong


def _taken(parse: Callable[[Mapping[str, Any]], Any], body: Mapping[str, Any]) -> bool:
    try:
        parse(body)
    except HttpError as error:
        assert error.status == 400
        return False
    return True
