"""What the headers Idempotency-Key and Last-Event-ID of a request say of its answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from starlette.requests import Request

from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.event_numbers import number_of


class Resumption(Struct, frozen=True):
    """What a request with an Idempotency-Key says of its answer.

    `key`: under which the pool keeps it; it is made of the header and of the API key that the
    request came with, so that nobody else can name it. `digest`: of path and body. `after`: the
    number of the last event that the client has.
    """

    key: str
    digest: bytes
    after: int | None


async def resumption_of(request: Request, body: Mapping[str, Any]) -> Resumption | None:
    """What the headers say; None without an Idempotency-Key. Raises HttpError."""
    idempotency = request.headers.get("idempotency-key", "").strip()
    after = number_of(request.headers.get("last-event-id"))
    if not idempotency:
        if after is not None:
            message = "Last-Event-ID goes with the Idempotency-Key of the request that it is about"
            raise bad_request(message)
        return None
    owner: bytes = request.state.owner_digest
    key = hashlib.sha256(b"%b\n%b" % (owner, idempotency.encode("latin-1"))).hexdigest()[:32]
    digest = await asyncio.to_thread(_digest, request.url.path, body)
    return Resumption(f"stream_{key}", digest, after)


def _digest(path: str, body: Mapping[str, Any]) -> bytes:
    text = json.dumps([path, body], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
