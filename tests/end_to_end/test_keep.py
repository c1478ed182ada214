"""`keep`, `describe` and `tokenize_chat` of the Python client with a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, UnknownModel
from support.pool import until

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

HI = [{"role": "user", "content": "hi"}]
CONFIG = """
[pool]
client_keep_alive = "10m"
[models.pinned]
path = "builtin:counting"
counting.step_us = 1
pin = true
"""


def row(client: Client, name: str) -> dict[str, Any]:
    return next(model for model in client.models() if model["name"] == name)


def test_keep_loads_bounds_and_unloads(client: Client) -> None:
    assert client.keep("counting", 500) == 500
    until(lambda: row(client, "counting")["state"] == "ready", "it is loaded")
    assert 300 < row(client, "counting")["expires_in"] <= 500
    assert client.keep("counting", -1) == 600, "client_keep_alive"
    assert client.keep("counting", 0) == 0
    until(lambda: row(client, "counting")["state"] == "cold", "it is unloaded")
    assert row(client, "counting")["expires_in"] is None
    assert client.keep("pinned", 0) == -1
    until(lambda: row(client, "pinned")["expires_in"] == -1, "it is loaded, and stays")
    with pytest.raises(UnknownModel, match="did you mean 'counting'"):
        client.keep("countin", 5)


def test_a_stream_ends_before_its_model_is_unloaded(client: Client) -> None:
    with client.stream("counting", "hello", max_tokens=2000, seed=7) as stream:
        for number, _ in enumerate(stream):
            if number == 0:
                client.keep("counting", 0)
        assert stream.result.usage["completion_tokens"] == 2000
    until(lambda: row(client, "counting")["state"] == "cold", "it is unloaded")


def test_all_that_is_known_of_a_model(client: Client, tmp_path: Path) -> None:
    until(lambda: client.describe("demo")["about"], "its files were read")
    description = client.describe("demo")
    about = description["about"]
    assert (description["name"], about["type"]) == ("demo", "llama")
    assert description["parameters"] == about["parameters"] > 10**6
    assert about["digest"].startswith(description["digest"]) and len(about["digest"]) == 64
    assert description["modified"] == about["details"]["modified"]


def test_a_chat_in_token_ids(client: Client) -> None:
    chat = client.tokenize_chat("counting", HI)
    assert (chat.ids, chat.thinks) == (list(b"user: hi\n"), False)
    assert chat.ids == client.tokenize("counting", "user: hi\n")
    with pytest.raises(BadRequest, match=r"messages\[0\]\.role is 'pope'"):
        client.tokenize_chat("counting", [{"role": "pope", "content": "x"}])
    with pytest.raises(BadRequest, match="does not generate text"):
        client.tokenize_chat("demo-embed", HI)
