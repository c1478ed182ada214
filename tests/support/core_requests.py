"""Makes requests for tests of queues, placement and state tables."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.requests.request import Reader, Request, RequestState, Run
from mlxpool.common.protocol.from_client import Generate


def new_request(
    ident: bytes = bytes(16),
    owner: str = "uid:1",
    arrival: int = 0,
    state: RequestState = RequestState.QUEUED,
    blobs: tuple[bytes, ...] = (),
    **body: Any,
) -> Request:
    """Returns a request for the model m; `body` and `blobs` are those of its `generate` message."""
    if not {"prompt", "messages", "tokens"} & body.keys():
        body["prompt"] = "a"
    message = Generate.parse({"model": "m", **body}, blobs)
    reader = Reader(1, 1, message.window, message.batch)
    request = Request(ident, owner, b"", message, "m", Run(0), reader, 0.0, 1.0, 1.0, 1.0, arrival)
    request.state = state
    return request
