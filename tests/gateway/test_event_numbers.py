"""Numbers of events, and the headers of a request that resumes an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from starlette.requests import Request

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.resumption import (
    GENERATION,
    EventNumbers,
    Resumption,
    number_of,
    resumption_of,
)

EVENTS = [b"event: a\ndata: 1\n\n", b'data: {"x":"id: 7"}\n\n', b"data: [DONE]\n\n"]
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "ä\ud800"}]}


def test_events_have_their_numbers_in_front_and_lines_stay_as_they_are() -> None:
    numbers = EventNumbers(0, None)
    assert numbers.of_events(EVENTS[0]) == b"id: 1\nevent: a\ndata: 1\n\n"
    assert numbers.of_events(EVENTS[1] + EVENTS[2]) == (
        b'id: 2\ndata: {"x":"id: 7"}\n\nid: 3\ndata: [DONE]\n\n'
    )
    assert EventNumbers(0, 1).of_lines(b"a\nb\nc\n") == b"b\nc\n"


@given(some.integers(0, 4), some.lists(some.integers(1, 3)), some.integers(0, 2))
def test_what_comes_behind_a_number_is_the_rest_however_it_is_written(
    after: int, sizes: list[int], gen: int
) -> None:
    first = GENERATION * gen
    whole = EventNumbers(gen, None).of_events(b"".join(EVENTS))
    numbers, left, rest = EventNumbers(gen, first + after), list(EVENTS), b""
    for size in [*sizes, 3]:
        rest += numbers.of_events(b"".join(left[:size]))
        del left[:size]
    had = b"".join(event + b"\n\n" for event in whole.split(b"\n\n")[: min(after, 3)])
    assert had + rest == whole


def test_a_number_of_another_generation_is_refused() -> None:
    for gen, after in ((1, 5), (0, GENERATION), (1, 2 * GENERATION)):
        with pytest.raises(HttpError, match="started again because") as caught:
            EventNumbers(gen, after)
        assert caught.value.status == 409


def test_events_that_another_reading_had_are_counted() -> None:
    numbers = EventNumbers(0, 2)
    numbers.skip(2)
    assert numbers.of_events(EVENTS[2]) == b"id: 3\ndata: [DONE]\n\n"


@pytest.mark.parametrize("text", ["x", "1.0", "-1", " ", "¹", "1" * 16])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(HttpError, match="Last-Event-ID"):
        number_of(text)
    assert number_of(None) is number_of("") is None and number_of("007") == 7


def asked(
    body: dict[str, Any] = BODY, path: str = "/v1/messages", owner: bytes = b"a", **headers: str
) -> Resumption | None:
    pairs = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    scope = {
        "type": "http",
        "path": path,
        "headers": [*pairs, (b"host", b"x")],
        "query_string": b"",
    }
    request = Request(scope)
    request.state.owner_digest = owner
    return asyncio.run(resumption_of(request, body))


def test_a_key_is_of_an_owner_and_a_digest_of_path_and_body() -> None:
    first = asked(idempotency_key="k")
    assert first is not None and asked() is None and asked(idempotency_key=" ") is None
    assert asked(dict(reversed(BODY.items())), idempotency_key="k") == first
    for other in (asked(owner=b"b", idempotency_key="k"), asked(idempotency_key="l")):
        assert other is not None and other.key != first.key and other.digest == first.digest
    for other in (
        asked({**BODY, "x": 1}, idempotency_key="k"),
        asked(path="/", idempotency_key="k"),
    ):
        assert other is not None and other.key == first.key and other.digest != first.digest
    with pytest.raises(HttpError, match="goes with the Idempotency-Key"):
        asked(last_event_id="1")
