"""Handles one HTTP exchange over ASGI: the bounded body, the response, a client's disconnect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Send

from mlxpool.common.protocol.unicode_text import not_unicode, place_of
from mlxpool.gateway.content_encoding import decoded
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.json_parts import decode_in_parts
from mlxpool.gateway.operations.exchange import REQUEST_ID, Exchange
from mlxpool.gateway.resumption import EventNumbers, Resumption

JSON = "application/json"
NDJSON = "application/x-ndjson"
# Content types of programs that do not name JSON: none, `curl -d`, Node's fetch of a text, others.
UNNAMED = ("", "application/x-www-form-urlencoded", "text/plain", "application/octet-stream")
TURNS = 4  # iterations of the event loop between two slices of long work
PARSED_AT_ONCE = 256 * 1024  # most bytes of a body that the event loop's thread parses
LISTED_AT_ONCE = 200  # rows of a list that are written before other requests are served
# Half of a surrogate pair: its JSON escape, or its bytes.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
TOO_DEEP = "the body is nested too deeply"
RAISE_BOUND = (
    "--max-body of `mlxpool gateway`, or the setting http_max_body of `mlxpool serve`, raises the"
    " bound"
)


class HeadersOnly(Exception):
    """Raised in the answer to HEAD after the headers, because the stream is not sent."""


class ResponseWriter:
    """Sends a response, as one JSON value or a stream of pieces, and records it in the exchange."""

    def __init__(self, send: Send, exchange: Exchange, id_header: str | None = None) -> None:
        """`id_header`: the name of a second header for the id of the request."""
        self.exchange = exchange
        self._ids = {REQUEST_ID: exchange.id, **({id_header: exchange.id} if id_header else {})}
        self._send = send
        self.started = False
        self.streaming = False  # a stream is open
        self.resumption: Resumption | None = None  # set for an Idempotency-Key
        self.numbers: EventNumbers | None = None  # set for a stream that outlives this gateway
        self._in_lines = False  # the stream has lines of JSON, not events

    async def json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole response."""
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        await self.data(data, JSON, status, headers)

    async def listing(self, value: Mapping[str, Any]) -> None:
        """Sends a list in OpenAI's form. Serves other requests between two slices of the list."""
        rows: list[bytes] = []
        for start in range(0, len(value["data"]), LISTED_AT_ONCE):
            part = value["data"][start : start + LISTED_AT_ONCE]
            text = json.dumps(part, ensure_ascii=False)[1:-1]
            rows.append(text.encode("utf-8", "replace"))
            await serve_others()
        head, tail = json.dumps({**value, "data": []}).encode().split(b"[]", 1)
        await self.data(b"".join((head, b"[", b", ".join(rows), b"]", tail)), JSON)

    async def data(
        self,
        data: bytes,
        content_type: str,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Sends a whole response of any content type."""
        length = {"content-length": str(len(data))}
        await self._start(status, content_type, {**(headers or {}), **length})
        await self._send({"type": "http.response.body", "body": data})

    def identified(self, error: HttpError) -> HttpError:
        """Sets the request's id in an error that has no id, and returns the error.

        Records the error's code.
        """
        error.request_id = error.request_id or self.exchange.id
        self.exchange.failure = error.code
        return error

    async def open(self, content_type: str) -> None:
        """Starts a stream. Its headers forbid clients to retry: the work would be done twice.

        Raises HeadersOnly in the answer to HEAD, whose stream nobody reads.
        """
        self._in_lines = content_type == NDJSON
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, content_type, {**headers, "x-should-retry": "false"})
        if self.exchange.method == "HEAD":
            await self._send({"type": "http.response.body", "body": b""})
            raise HeadersOnly
        self.streaming = self.exchange.streamed = True

    async def write(self, data: bytes) -> None:
        """Sends whole events or lines of the stream; waits while the client reads slowly."""
        if self.numbers is not None:
            numbers = self.numbers
            data = numbers.of_lines(data) if self._in_lines else numbers.of_events(data)
        if data:
            await self.write_aside(data)

    async def write_aside(self, data: bytes) -> None:
        """Sends stream data that is not part of the answer: a keep-alive, or an error event."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """Ends the stream."""
        self.streaming = False
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        self.exchange.status = status
        fields = {"content-type": content_type, **self._ids, **headers}
        pairs = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


def is_json_type(content_type: str, *, from_page: bool) -> bool:
    """Whether a body with this content type is read as JSON.

    The type of a body from a web page must be a JSON type. Other clients may also send no type, or
    one of the types in UNNAMED, such as text/plain.
    """
    kind = content_type.partition(";")[0].strip().lower()
    named = kind in (JSON, "text/json") or (
        kind.startswith("application/") and kind[-5:] == "+json"
    )
    return named or (not from_page and kind in UNNAMED)


async def read_json(request: Request, max_bytes: int, seconds: float) -> dict[str, Any]:
    """Returns the JSON object in a request's body.

    Raises HttpError if the body is too large, too slow, of another type, broken, or not an object.
    """
    content_type = request.headers.get("content-type", "")
    if not is_json_type(content_type, from_page="origin" in request.headers):
        message = f"content-type must be {JSON}, got {content_type or 'none'}"
        raise HttpError(415, message, "unsupported_media_type", retry=False)
    try:
        async with asyncio.timeout(seconds):
            data = await _read_body(request, max_bytes)
    except TimeoutError:
        message = f"the body was not there after {seconds:g} s"
        raise HttpError(408, message, "body_too_slow", retry=False) from None
    try:
        value = await _parsed(data)
    except RecursionError:
        raise HttpError(400, TOO_DEEP, "not_json", retry=False) from None
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}", "not_json", retry=False) from None
    if may_break_text(data) and (fault := not_unicode(value)):
        raise HttpError(400, fault, "bad_request", place_of(fault), retry=False)
    if not isinstance(value, dict):
        message = f"the body must be a JSON object, got {type(value).__name__}"
        raise HttpError(400, message, "not_json", retry=False)
    return value


def may_break_text(data: bytes) -> bool:
    """Whether the JSON of these bytes may have half a surrogate pair."""
    return json.detect_encoding(data) != "utf-8" or _HALF.search(data) is not None


async def _parsed(data: bytes) -> Any:
    """Returns the JSON value of a body; another thread parses a large body. Raises ValueError."""
    if len(data) <= PARSED_AT_ONCE:
        return json.loads(data)
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    return await asyncio.to_thread(decode_in_parts, text)


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the decoded body; the bound holds for the encoded and for the decoded bytes."""
    declared = request.headers.get("content-length", "0")
    _check_size(int(declared) if declared.isdecimal() else 0, max_bytes)
    pieces = _bounded(request.stream(), max_bytes)
    codings = request.headers.getlist("content-encoding")
    parts = [part async for part in _bounded(decoded(pieces, codings), max_bytes)]
    return b"".join(parts)


async def _bounded(pieces: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yields the pieces of a body. Raises HttpError if it has more than `max_bytes`."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        _check_size(size, max_bytes)
        yield piece


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        message = f"the body has {size} bytes or more, at most {max_bytes} are taken; {RAISE_BOUND}"
        raise HttpError(413, message, "body_too_large", retry=False)


async def serve_others() -> None:
    """Lets other tasks of the event loop run for TURNS iterations.

    A single iteration is not enough, because a request needs several. Long work calls this function
    between its slices. If there are no other tasks, it takes microseconds.
    """
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def cancel_on_disconnect(
    receive: Receive, work: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Runs `work`; cancels it when the client closes the connection. Raises the errors of `work`.

    Returns whether the work was cancelled.
    """
    working = asyncio.create_task(work())
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, disconnect):
            task.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)
    if working.cancelled():
        return True
    working.result()
    return False


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
