"""Lets clients resume streams, by Idempotency-Key, Last-Event-ID and numbered events."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from starlette.requests import Request

from mlxpool.gateway.errors import HttpError, bad_request

GENERATION = 10**9  # event numbers reserved for each generation of an answer
MAX_DIGITS = 15  # most digits of the number of an event


class Resumption(Struct, frozen=True):
    """The headers of a request with an Idempotency-Key.

    `key`: the key of the answer in the pool. It is made from the header and the request's API key,
    so that no other API key can use the answer. `digest`: the digest of path and body. `after`: the
    number of the last event that the client has.
    """

    key: str
    digest: bytes
    after: int | None


async def resumption_of(request: Request, body: Mapping[str, Any]) -> Resumption | None:
    """Reads the Resumption of a request from its headers. Raises HttpError.

    Returns None without an Idempotency-Key.
    """
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


class EventNumbers:
    """Numbers the events of one HTTP response, from 1 on. Omits events that the client has.

    All responses with the same answer have the same numbers. If the answer was computed anew, after
    a change of the model, it has another generation (`gen`) and higher numbers.
    """

    def __init__(self, gen: int, after: int | None) -> None:
        """`after`: the number of the last event that the reader has; None if it has no event.

        Raises HttpError for a number of another generation.
        """
        self._number = GENERATION * gen  # number of the last event
        self._after = self._number if after is None else after
        if not 0 <= self._after - self._number < GENERATION:
            raise HttpError(
                409,
                f"Last-Event-ID is {after}, and the events of this answer are numbered from"
                f" {self._number + 1} on: it was started again because its model has"
                " changed; send the request without Last-Event-ID",
                "job_restarted",
                retry=False,
            )

    def skip(self, count: int) -> None:
        """Skips `count` event numbers.

        An earlier response used them for events about errors of the job. This response does not
        send these events.
        """
        self._number += count

    def of_events(self, data: bytes) -> bytes:
        """Returns the events after the number `after`, each with its number as `id`."""
        return self._kept(data, b"\n\n", "id: {}\n")

    def of_lines(self, data: bytes) -> bytes:
        """Returns the lines of JSON after the number `after`; a line does not show its number."""
        return self._kept(data, b"\n", "")

    def _kept(self, data: bytes, end: bytes, name: str) -> bytes:
        kept = []
        for event in data.split(end)[:-1]:
            self._number += 1
            if self._number > self._after:
                kept += [name.format(self._number).encode(), event, end]
        return b"".join(kept)


def number_of(last_event_id: str | None) -> int | None:
    """Returns the number in the header Last-Event-ID; None without it. Raises HttpError."""
    if not last_event_id:
        return None
    if re.fullmatch(rf"[0-9]{{1,{MAX_DIGITS}}}", last_event_id) is None:
        message = f"Last-Event-ID is {last_event_id!r:.60}, must be the id of an event, as 12"
        raise HttpError(400, message, "bad_request", retry=False)
    return int(last_event_id)
