"""Token ids over HTTP: the ids that the model reads for a text or a chat."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.openapi_answers import faults
from support.pool import PATIENCE, Pool

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

HI: Any = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def ask(url: str, path: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json={"model": "demo-chat", **fields}, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert not faults(body, "Tokens" if path == "/tokenize" else "TokenText")
    return body


def test_a_text_and_back(url: str, pool: Pool) -> None:
    tokenized = ask(url, "/tokenize", prompt="Say: é!", return_token_strs=True)
    with pool.client() as client:
        assert tokenized["tokens"] == client.tokenize("demo-chat", "Say: é!")
        assert tokenized["token_strs"] == client.token_texts("demo-chat", tokenized["tokens"])
        assert client.token_texts("demo-chat", []) == []
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"])
    assert tokenized["token_strs"][0] in ("S", "Say") and tokenized["max_model_len"] == 1024
    assert ask(url, "/detokenize", tokens=tokenized["tokens"]) == {"prompt": "Say: é!"}
    assert ask(url, "/tokenize", prompt="")["tokens"] == []


def test_special_tokens_can_be_left_out(url: str) -> None:
    with_them = ask(url, "/tokenize", model="demo", prompt="x = 1", return_token_strs=True)
    assert with_them["token_strs"][0] == "<|endoftext|>"
    fields = {"model": "demo", "add_special_tokens": False}
    assert ask(url, "/tokenize", **fields, prompt="x = 1")["tokens"] == with_them["tokens"][1:]
    written = ask(url, "/tokenize", **fields, prompt="<|endoftext|>x = 1")
    assert written["tokens"] == with_them["tokens"]


def test_a_chat_is_counted_as_its_prompt(url: str) -> None:
    for more in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": True}}):
        tokenized = ask(url, "/tokenize", messages=HI, **more)
        body = {"model": "demo-chat", "messages": HI, "max_tokens": 1, **more}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
        assert answer["usage"]["prompt_tokens"] == tokenized["count"]
        assert tokenized["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [9_999_999]}, None),
        ("/detokenize", {"tokens": [1], "model": "nobody"}, "model"),
    ],
)
def test_what_cannot_be_is_named(
    url: str, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(f"{url}{path}", json={"model": "demo-chat", **fields}, timeout=PATIENCE)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param
