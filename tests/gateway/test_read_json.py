"""JSON with an unpaired surrogate is refused on every route; the error names its position."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.pool_options import openai_format
from mlxpool.gateway.http import read_json
from mlxpool.gateway.openai.batches.lines import parsed_line


def read(data: bytes) -> Any:
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    return asyncio.run(read_json(Request(scope, receive), 10**7, 9))


BODY = {"messages": [{"content": "😀"}, {"content": "a\ud83d"}], "padding": "x"}
FAULT = r"messages\[1\].content is not Unicode text: .* U\+D83D, at character 1"


@pytest.mark.parametrize("padding", ["x", "x" * 300_000])
@pytest.mark.parametrize(
    "encode",
    [
        lambda body: json.dumps(body).encode(),
        lambda body: json.dumps(body).upper().encode(),
        lambda body: json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        lambda body: json.dumps(body).encode("utf-16"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_place(encode: Any, padding: str) -> None:
    data = (
        encode({**BODY, "padding": padding}).replace(b"\\UD8", b"\\ud8").replace(b"\\UDE", b"\\ude")
    )
    with pytest.raises(HttpError, match=f"(?i){FAULT}") as caught:
        read(data)
    assert caught.value.status == 400 and str(caught.value.param).lower() == "messages[1].content"


def test_whole_characters_in_escapes_are_taken() -> None:
    assert read(json.dumps({"a": "😀"}).encode()) == {"a": "😀"}
    assert read(json.dumps({"a": "\\ud83d"}).encode()) == {"a": "\\ud83d"}, (
        "a text with a backslash"
    )


def test_a_line_of_a_batch_and_a_schema_in_a_text_are_read_alike() -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/u", "body": {"model": "m", "x": "\ud83d"}}
    with pytest.raises(HttpError, match=r"body\.x is not Unicode text"):
        parsed_line(json.dumps(line).encode(), "/u")
    with pytest.raises(HttpError, match=r"guided_json\.const is not Unicode text"):
        openai_format({"guided_json": json.dumps({"const": "\ud83d"})})
