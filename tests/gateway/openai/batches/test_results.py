"""Results of batches: in which thread they are made, and without their lines."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from mlxpool.client import AsyncClient, Result
from mlxpool.client.batches.outcome import Page
from mlxpool.gateway.openai.batches import bodies, kept_batches
from mlxpool.gateway.openai.batches.bodies import BatchRequest
from mlxpool.gateway.openai.batches.fields import CALLS, ENDPOINTS
from mlxpool.gateway.openai.batches.results import result_line
from mlxpool.gateway.openai.batches.stored_lines import StoredLines


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_answers_that_are_numbers_are_made_in_another_thread(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be 256 vectors, which take a fraction of a second."""
    threads: list[int] = []

    def made(*_: Any) -> tuple[bool, bytes]:
        threads.append(threading.get_ident())
        return True, b"{}\n"

    async def page(*_: Any) -> Page:
        return Page(({"line": 0}, {"line": 1}), -1)

    async def line(self: StoredLines, number: int) -> dict[str, Any]:
        return {}

    async def whole(self: Any, outcome: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return outcome, None

    monkeypatch.setattr(kept_batches, "result_line", made)
    monkeypatch.setattr(kept_batches, "ask", page)
    monkeypatch.setattr(StoredLines, "line", line)
    monkeypatch.setattr(kept_batches.KeptBatches, "_whole", whole)

    async def read() -> bytes:
        kept = kept_batches.KeptBatches(AsyncClient.__new__(AsyncClient))
        request = BatchRequest(endpoint, "file-in", "24h", 2, {})
        row = {"key": "batch", "file": "lines"}
        return b"".join([part async for part in kept.results(row, request, bodies.OUTPUT)])

    assert asyncio.run(read()) == b"{}\n" * 2
    assert [thread != threading.get_ident() for thread in threads] == [endpoint in CALLS] * 2


@pytest.mark.parametrize("endpoint", CALLS)
def test_an_answer_whose_line_is_missing_says_so(endpoint: str) -> None:
    """It stays in the output file, where the batch counts it."""
    row = {"line": 3, "id": "label", "state": "done", "job": bytes(16), "model": "m"}
    result = Result(text="", ids=(), reason="stop", usage={}, timings_ms={}, seed=0, attempts=1)
    in_output, data = result_line(row, {}, endpoint, result)
    found = json.loads(data)
    assert in_output and found["custom_id"] == "label" and found["response"] is None
    assert found["error"]["code"] == "line_missing"
    assert "the file of the batch's lines is not stored" in found["error"]["message"]
