"""One HTTP request: its body within bounds, its answer, and that its sender may leave. ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Send

from mlxpool.gateway.errors import Fault

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"  # what `curl -d` says whatever it sends
DEEPEST = "the body is nested too deeply"


class Reply:
    """What is sent: one JSON value, or a stream of pieces."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.streaming = False  # a stream has begun and is not over

    async def json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer."""
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        await self._start(status, JSON, {**(headers or {}), "content-length": str(len(data))})
        await self._send({"type": "http.response.body", "body": data})

    async def open(self, content_type: str) -> None:
        """A stream begins; once it does asking again would do the work twice."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, content_type, {**headers, "x-should-retry": "false"})
        self.streaming = True

    async def write(self, data: bytes) -> None:
        """A piece of the stream; waits for a slow reader."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        """The stream is over."""
        self.streaming = False
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        every = {"content-type": content_type, **headers}
        pairs = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in every.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


async def read_json(
    request: Request, most: int, seconds: float, *, any_type: bool
) -> dict[str, Any]:
    """The map in a request's body. Raises Fault: too large, too slow, another type, no JSON map.

    `any_type`: a form's type will do too, unless a page in a browser sent it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    from_page = "origin" in request.headers
    if kind != JSON and not (any_type and not from_page and kind in ("", FORM)):
        words = f"content-type must be {JSON}, got {kind or 'none'}"
        raise Fault(415, words, "unsupported_media_type", retry=False)
    try:
        async with asyncio.timeout(seconds):
            data = await _read(request, most)
    except TimeoutError:
        words = f"the body was not there after {seconds:g} s"
        raise Fault(408, words, "body_too_slow", retry=False) from None
    try:
        value = json.loads(data)
    except RecursionError:
        raise Fault(400, DEEPEST, "not_json", retry=False) from None
    except ValueError as error:
        raise Fault(400, f"the body is not JSON: {error}", "not_json", retry=False) from None
    if not isinstance(value, dict):
        words = f"the body must be a JSON object, got {type(value).__name__}"
        raise Fault(400, words, "not_json", retry=False)
    return value


async def _read(request: Request, most: int) -> bytes:
    told = request.headers.get("content-length", "0")
    size = int(told) if told.isdecimal() else 0
    parts: list[bytes] = []
    if size <= most:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                break
            parts.append(part)
    if size > most:
        words = f"the body has {size} bytes or more, at most {most} are taken"
        raise Fault(413, words, "body_too_large", retry=False)
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work; it is cancelled when the sender closes the connection."""
    doing = asyncio.create_task(work())
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
    if not doing.cancelled():
        doing.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
