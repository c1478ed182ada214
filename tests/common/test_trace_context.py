"""The header `traceparent`."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.protocol.from_client import Generate, request_digest
from mlxpool.common.trace_context import ParentSpan, parent_of

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
