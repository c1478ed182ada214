"""A small HTTP/1.1 client over asyncio: one request per connection, answers read line by line."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MAX_LINE = 2**20  # most bytes of a line of the head, or of an event
READ = 2**16  # most bytes that are read at once
MAX_MESSAGE = 160  # most characters of an error's text that are shown


class HttpFailure(Exception):
    """The server refused the request, or its answer is not valid."""


class Response(Struct, frozen=True):
    """The head of an answer, and the connection that has its body."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises HttpFailure if the body ends too early."""
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await self.reader.readline()).partition(b";")[0], 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                return
            remaining = int(self.headers.get("content-length", -1))
            while remaining and (
                piece := await self.reader.read(remaining if 0 < remaining < READ else READ)
            ):
                remaining -= len(piece) if remaining > 0 else 0
                yield piece
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise HttpFailure("the connection ended within the answer") from error
        if remaining > 0:
            raise HttpFailure("the connection ended within the answer")

    async def lines(self) -> AsyncIterator[bytes]:
        """Yields the lines of the body without line ends."""
        rest = b""
        async for piece in self.pieces():
            *complete, rest = (rest + piece).split(b"\n")
            for line in complete:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def body(self) -> bytes:
        """Returns the whole body."""
        return b"".join([piece async for piece in self.pieces()])


async def connected(url: str) -> Link:
    """Returns a connection to a URL's server. Raises OSError if the server cannot be reached."""
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    return await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
        limit=MAX_LINE,
    )


@asynccontextmanager
async def opened(
    url: str,
    *,
    api_key: str = "",
    body: Mapping[str, Any] | None = None,
    link: Link | None = None,
) -> AsyncIterator[Response]:
    """Sends a request (POST with a JSON body, else GET); leaving the context ends the connection.

    `link`: a connection to use instead of a new one. Raises HttpFailure for a status other than
    200, and OSError if the server cannot be reached.
    """
    parts = urlsplit(url)
    reader, writer = link or await connected(url)
    try:
        writer.write(_request(parts.netloc, parts.path or "/", api_key, body))
        response = await _head(reader)
        if response.status != 200:
            text = (await response.body()).decode("utf-8", "replace")
            raise HttpFailure(f"HTTP {response.status}: {message_of(text)}")
        yield response
    finally:
        writer.close()


def _request(host: str, path: str, api_key: str, body: Mapping[str, Any] | None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {host}",
        "Accept: */*",
        "Connection: close",
    ]
    if api_key:
        head.append(f"Authorization: Bearer {api_key}")
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*head, "", ""]).encode() + data


async def _head(reader: asyncio.StreamReader) -> Response:
    words = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
        raise HttpFailure("no HTTP answer")
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Response(int(words[1]), headers, reader)


def message_of(text: str) -> str:
    """Returns the message of a server's error in one short line."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    while isinstance(value, dict):
        value = value.get("error", value.get("message", value.get("detail", "")))
    return " ".join(str(value).split())[:MAX_MESSAGE]
