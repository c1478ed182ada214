"""The gateway's list of models: a request waits until its model is inspected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mlxpool.client import AsyncClient
from mlxpool.common.errors import ModelUnavailable, UnknownModel
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.models import ModelInfo, ModelList
from mlxpool.gateway.ollama import requests
from mlxpool.gateway.ollama.routes import OllamaRoutes
from mlxpool.gateway.settings import Settings

NEW = {"name": "m", "inspected": False, "type": None, "chat": None}
DONE = {"name": "m", "inspected": True, "type": "llama", "chat": {"tools": "json"}}


class ScriptedPool(AsyncClient):
    """A client whose `models` returns the next of the given lists at each call.

    After that it returns the last list at every call.
    """

    def __init__(self, *lists: Sequence[dict[str, Any]]) -> None:
        self.lists, self.asked = list(lists), 0

    async def models(self) -> list[dict[str, Any]]:
        self.asked += 1
        return list(self.lists.pop(0) if len(self.lists) > 1 else self.lists[0])

    def __del__(self) -> None:
        pass


def got(pool: ScriptedPool, wait: float = 60.0) -> ModelInfo:
    return asyncio.run(ModelList(pool, wait).get("m"))


def test_a_request_waits_for_the_inspection_of_its_model() -> None:
    model = got(ScriptedPool([NEW], [NEW], [DONE]))
    assert model.inspected and model.chat is not None and model.chat.tools == "json"


def test_the_wait_has_a_bound_and_ends_with_an_error() -> None:
    with pytest.raises(ModelUnavailable, match="not been inspected for 0 s") as caught:
        got(ScriptedPool([NEW]), wait=0.01)
    assert caught.value.retry_after_ms == 10


def test_a_model_that_goes_meanwhile_is_unknown() -> None:
    with pytest.raises(UnknownModel, match="any more"):
        got(ScriptedPool([NEW], []))


def test_a_model_whose_files_cannot_be_read_is_not_waited_for() -> None:
    pool = ScriptedPool([{**NEW, "inspected": True}])
    model = got(pool)
    assert model.inspected and not model.readable and pool.asked == 1


def test_the_short_rows_of_many_models_say_whether_they_are_inspected() -> None:
    row = {"name": "m", "state": "cold", "chat": None}
    assert not ModelInfo.from_row({**row, "inspected": False}).inspected
    assert ModelInfo.from_row({**row, "inspected": True}).readable


def test_a_prompt_of_unreadable_files_is_sent_only_as_it_is() -> None:
    pool = ScriptedPool([{**NEW, "inspected": True}])
    routes, model = OllamaRoutes(PoolAccess(Settings(), pool)), got(pool)

    def prompt(**more: Any) -> dict[str, Any]:
        request = requests.generate({"model": "m", "prompt": "hi", **more})
        return dict(asyncio.run(routes._conversation(model, request)).prompt)

    assert prompt(raw=True) == {"prompt": "hi"}
    with pytest.raises(ModelUnavailable, match="could not be read"):
        prompt()
