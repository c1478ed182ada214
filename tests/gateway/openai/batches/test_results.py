"""Results of batches: the thread that makes them, and results without their lines."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from mlxpool.client import AsyncClient, Result
from mlxpool.client.batches.outcome import Page
from mlxpool.common.errors import Gone
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches import kept as kept_module
from mlxpool.gateway.openai.batches.bodies import BatchRequest
from mlxpool.gateway.openai.batches.fields import CALLS, ENDPOINTS
from mlxpool.gateway.openai.batches.kept import StoredLines
from mlxpool.gateway.openai.batches.results import result_line


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_answers_that_are_numbers_are_made_in_another_thread(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread converts answers of vectors: 256 vectors take long to convert."""
    threads: list[int] = []

    def made(*_: Any) -> tuple[bool, bytes]:
        threads.append(threading.get_ident())
        return True, b"{}\n"

    async def page(*_: Any) -> Page:
        return Page(({"line": 0, "state": "done"}, {"line": 1, "state": "done"}), -1)

    async def find(*_: Any) -> tuple[dict[str, Any], None]:
        return {"key": "batch", "file": "lines"}, None

    async def line(self: StoredLines, number: int) -> dict[str, Any]:
        return {}

    async def whole(self: Any, outcome: dict[str, Any]) -> tuple[dict[str, Any], None]:
        return outcome, None

    monkeypatch.setattr(kept_module, "result_line", made)
    monkeypatch.setattr(kept_module, "ask", page)
    monkeypatch.setattr(StoredLines, "line", line)
    monkeypatch.setattr(kept_module.KeptBatches, "_whole", whole)
    monkeypatch.setattr(kept_module.KeptBatches, "find", find)

    async def read() -> bytes:
        kept = kept_module.KeptBatches(AsyncClient.__new__(AsyncClient))
        request = BatchRequest(endpoint, "file-in", "24h", 2, {})
        row = {"key": "batch", "file": "lines"}
        return b"".join([part async for part in kept.results(row, request, bodies.OUTPUT)])

    assert asyncio.run(read()) == b"{}\n" * 2
    assert [thread != threading.get_ident() for thread in threads] == [endpoint in CALLS] * 2


@pytest.mark.parametrize("endpoint", CALLS)
def test_an_answer_whose_line_is_missing_says_so(endpoint: str) -> None:
    """The error is in the output file, not the error file: the line counts as completed."""
    row = {"line": 3, "id": "label", "state": "done", "job": bytes(16), "model": "m"}
    result = Result(text="", ids=(), reason="stop", usage={}, timings_ms={}, seed=0, attempts=1)
    in_output, data = result_line(row, {}, endpoint, result)
    record = json.loads(data)
    assert in_output and record["custom_id"] == "label" and record["response"] is None
    assert record["error"]["code"] == "line_missing"
    assert "the file of the batch's lines is not stored" in record["error"]["message"]


ROWS = ({"line": 0, "id": "a", "job": bytes(16)}, {"line": 1, "id": "b", "job": bytes(16)})


def read_while_deleted(
    monkeypatch: pytest.MonkeyPatch, kind: str, deleted: list[str], after: int
) -> list[bytes]:
    """Returns the parts of a result file of two pages, read while the batch changes.

    After page `after` the results of the lines are gone, and the batch lists the files `deleted` as
    deleted.
    """
    pages = 0

    async def page(*_: Any) -> Page:
        nonlocal pages
        pages += 1
        state = "gone" if pages > after else "dead"
        return Page(({**ROWS[pages - 1], "state": state},), 0 if pages == 1 else -1)

    async def find(*_: Any) -> tuple[dict[str, Any], None]:
        return {"key": "batch", "deleted": deleted if pages > after else []}, None

    async def line(self: StoredLines, number: int) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(kept_module, "ask", page)
    monkeypatch.setattr(StoredLines, "line", line)
    monkeypatch.setattr(kept_module.KeptBatches, "find", find)
    monkeypatch.setattr(kept_module, "result_line", lambda *_: (kind == bodies.OUTPUT, b"{}\n"))
    parts: list[bytes] = []

    async def read() -> None:
        kept = kept_module.KeptBatches(AsyncClient.__new__(AsyncClient))
        request = BatchRequest("/v1/completions", "file-in", "24h", 2, {})
        async for part in kept.results({"key": "batch", "file": "lines"}, request, kind):
            parts.append(part)

    try:
        asyncio.run(read())
    except Gone:
        parts.append(b"gone")
    return parts


@pytest.mark.parametrize("kind", [bodies.OUTPUT, bodies.ERROR])
def test_a_file_that_is_deleted_while_it_is_read_does_not_end_as_if_it_were_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = [bodies.RELEASED[kind]]
    assert read_while_deleted(monkeypatch, kind, deleted, after=1) == [b"{}\n", b"gone"]


def test_an_error_file_has_no_line_of_an_output_file_that_is_deleted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = read_while_deleted(monkeypatch, bodies.ERROR, [bodies.RELEASED[bodies.OUTPUT]], after=1)
    assert parts == [b"{}\n", b""]
