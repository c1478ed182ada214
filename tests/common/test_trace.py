"""Trace files for checkers (off by default, errors ignored), and trace contexts of requests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.protocol.from_client import Generate, request_digest
from mlxpool.common.trace import VARIABLE, History
from mlxpool.common.trace_context import ParentSpan, parent_of


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


def test_off_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    history = History("broker")
    history.write("nothing")
    assert not history.on
    assert lines(tmp_path) == []


def test_the_fields_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    history = History("worker-m/0")
    history.write("work", id=bytes([0xAB] * 16), count=3)
    history.write("end")
    history.close()
    history.write("late")
    first, second = lines(tmp_path)
    assert (first["who"], first["what"], first["pid"]) == ("worker-m/0", "work", os.getpid())
    assert first["id"] == "ab" * 16 and first["count"] == 3
    assert float(str(first["t"])) <= float(str(second["t"]))


def test_a_full_disk_loses_the_line_only(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("missing program: /dev/full, a file system that is always full")
    (tmp_path / f"broker-{os.getpid()}.jsonl").symlink_to("/dev/full")
    history = History("broker", str(tmp_path))
    history.write("work")
    assert history.on
    history.close()


# ---- trace context -------------------------------------------------------------------------------
# The header `traceparent`.


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("given", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # further flags are ignored
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-has", True),
        (f" 00-{TRACE}-{SPAN}-01\t", True),
    ],
)
def test_a_span_is_read(given: str, sampled: bool) -> None:
    assert parent_of(given) == ParentSpan(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "given",
    [
        None,
        7,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01" + "-x" * 200,
    ],
)
def test_what_the_standard_has_ignored(given: Any) -> None:
    assert parent_of(given) is None
    body = {"model": "m", "prompt": "x", "traceparent": given}
    asked = Generate.parse(body, ())
    assert (asked.traceparent, asked.warnings) == ("", ())


def test_a_request_may_be_sent_again_for_another_span() -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "m", "prompt": "x", "traceparent": f"00-{TRACE}-{number:016x}-01"}
        for number in (1, 2)
    ]
    assert [Generate.parse(body, ()).traceparent for body in bodies] == [
        body["traceparent"] for body in bodies
    ]
    assert request_digest(bodies[0], ()) == request_digest(bodies[1], ())
