"""openapi.json: valid, with every route and field, and true: it takes what the parsers take."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import validate

from mlxpool.client import AsyncClient
from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.anthropic import requests as anthropic_fields
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.jobs import requests as jobs
from mlxpool.gateway.jobs.requests import JOB, OF_CALLS
from mlxpool.gateway.ollama import fields as ollama_fields
from mlxpool.gateway.ollama import requests as ollama
from mlxpool.gateway.openai import decisions, vectors
from mlxpool.gateway.openai import fields as openai_fields
from mlxpool.gateway.openai import requests as openai
from mlxpool.gateway.openai import token_routes as tokens
from mlxpool.gateway.openai.batches import requests as batches
from mlxpool.gateway.openai.batches.fields import BATCH
from mlxpool.gateway.openai.responses_api import requests as responses_api
from mlxpool.gateway.openai.responses_api.fields import RESPONSE
from mlxpool.gateway.openai.token_routes import DETOKENIZE, TOKENIZE
from mlxpool.gateway.openapi import document
from mlxpool.gateway.route_table import NOT_BUILT, ROUTES
from mlxpool.gateway.settings import Settings
from support.openapi_answers import validator

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
DOCUMENT = document(ROUTES, "1.2", keys=True)
# path -> the parser, and a body that it takes
PARSERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], Body, dict[str, Any]]] = {
    "/v1/chat/completions": (
        openai.chat,
        openai_fields.CHAT,
        {"model": "m", "messages": HI, "stream": True, "logprobs": True},
    ),
    "/v1/completions": (
        openai.completion,
        openai_fields.COMPLETION,
        {"model": "m", "prompt": "x", "stream": True},
    ),
    "/v1/responses": (
        responses_api.response,
        RESPONSE,
        {"model": "m", "input": "x", "stream": True, "include": ["message.output_text.logprobs"]},
    ),
    "/v1/messages": (
        anthropic.message,
        anthropic_fields.MESSAGES,
        {"model": "m", "messages": HI, "max_tokens": 5},
    ),
    "/v1/messages/count_tokens": (
        anthropic.counted,
        anthropic_fields.COUNT_TOKENS,
        {"model": "m", "messages": HI},
    ),
    "/v1/jobs": (jobs.job, JOB, {"model": "m", "prompt": "x"}),
    "/v1/batches": (
        batches.new_batch,
        BATCH,
        {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    "/tokenize": (tokens.tokenize, TOKENIZE, {"model": "m", "prompt": "x"}),
    "/detokenize": (tokens.detokenize, DETOKENIZE, {"model": "m", "tokens": [1]}),
    "/v1/embeddings": (vectors.embeddings, openai_fields.EMBEDDINGS, {"model": "m", "input": "x"}),
    "/v1/rerank": (
        vectors.rerank,
        openai_fields.RERANK,
        {"model": "m", "query": "x", "documents": ["y"]},
    ),
    "/v1/score": (
        vectors.score,
        openai_fields.SCORE,
        {"model": "m", "text_1": "x", "text_2": "y"},
    ),
    "/v1/classify": (vectors.classify, openai_fields.CLASSIFY, {"model": "m", "input": "x"}),
    "/v1/decisions": (
        decisions.decisions,
        openai_fields.DECISIONS,
        {"model": "m", "prompt": "x", "questions": [{}]},
    ),
    "/api/generate": (ollama.generate, ollama_fields.GENERATE, {"model": "m", "logprobs": True}),
    "/api/chat": (ollama.chat, ollama_fields.CHAT, {"model": "m", "logprobs": True}),
    "/api/embed": (ollama.embed, ollama_fields.EMBED, {"model": "m"}),
    "/api/embeddings": (ollama.embeddings, ollama_fields.EMBEDDINGS, {"model": "m"}),
    "/api/show": (ollama.show, ollama_fields.SHOW, {"model": "m"}),
    "/api/pull": (ollama.pull, ollama_fields.PULL, {"model": "m"}),
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
# What a schema cannot say: the rest of one field is told by another, or by the text itself.
UNSAID: Mapping[str, tuple[Any, ...]] = {
    "best_of": (5, 21, 33),  # not with stream, and not less than n
    "max_tokens": (0,),  # with echo or prompt_logprobs
    "prompt_logprobs": (0, 1, 5),  # not with stream
    "logprobs": (None, False),  # top_logprobs of no use without it
    "text_1": (["x", "y"], ["x"] * 65, ["y"] * 33),  # as many as text_2 has
    "keep_alive": ("x", "auto", "none", "low", "float", "text", "", "x" * 300, "x" * 1025),
    "guided_json": ("x", "auto", "none", "low", "float", "text", "", "x" * 300, "x" * 1025),
    "images": (["x"], ["x", "y"], [""], ["text"], ["x"] * 65, ["y"] * 33),  # not base64
    "raw": (True,),
    "name": ("",),  # beside a model
    "add_generation_prompt": (False,),  # with continue_message only
    "continue_message": (True,),  # behind a message of the assistant
    "continue_final_message": (True,),
    "model": (None,),  # `name` may stand in its place
    "/v1/jobs prompt": (None,),  # one of three, and what goes with messages alone
    "/v1/jobs messages": (
        [{}],
        [{"text": "x"}],
        HI,
        [{"role": "pope", "content": "x"}],
        [TOOL],
        [{"type": "web"}],
    ),
    "/v1/responses input": ([TOOL], [{"type": "web"}]),  # nothing is left of the conversation
    "/v1/jobs tokens": ([0], [1, 2], [[1, 2]]),
    **{f"/v1/jobs {name}": SAMPLES for name in OF_CALLS},  # which go with the kind of a call
    "/v1/jobs think": (True, False, "low"),
    "/v1/jobs tools": (
        [{}],
        [{"text": "x"}],
        HI,
        [{"role": "pope", "content": "x"}],
        [TOOL],
        [{"type": "web"}],
    ),
    "/tokenize prompt": (None,),  # `messages` may stand in its place
    "/tokenize messages": (HI,),  # which does not go with a prompt
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
    parse, body, base = PARSERS[path]
    check = validator(body.schema())
    assert check.is_valid(base) and parse(base)
    wrong = []
    for name in sorted(body.names):
        unsaid = (*UNSAID.get(name, ()), *UNSAID.get(f"{path} {name}", ()))
        for value in SAMPLES:
            if any(value == one and type(value) is type(one) for one in unsaid):
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
