"""A stream that is open on a connection, and the endpoint to which a connection connects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from mlxpool.client.request import Draft
from mlxpool.client.retry import StreamRetry
from mlxpool.client.stream import Delta, StreamState
from mlxpool.common.errors import BadRequest
from mlxpool.common.paths import default_run_dir
from mlxpool.common.transport import endpoints, sockets


class OpenStream(Struct, eq=False):
    """A stream on its connection: its state, its retries, and the function that gets its deltas."""

    state: StreamState
    retry: StreamRetry
    draft: Draft  # the message that was sent first
    deadline: float | None  # the user's deadline, in monotonic seconds
    deliver: Callable[[Delta | None], None]  # called by the connection's thread; None: stream's end
    read: int = 0  # number of ids that the reader has got; only the reader's thread sets it
    owner: str = ""  # the owner on whose behalf the stream was sent; "": the client itself
    finished: bool = False  # the reader got the end, or closed; only its thread sets this
    acked: int = 0  # number of ids that were acknowledged to the broker

    def left(self) -> float | None:
        """Returns the seconds to the user's deadline; None without a deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def front_endpoint(run_dir: str | Path | None, endpoint: str | None) -> str:
    """Returns the endpoint to connect to. Raises the errors of `Connection`."""
    if not endpoint:
        if "://" in str(run_dir):
            raise BadRequest(
                f"run_dir is a folder, got {str(run_dir)!r:.200}; give it as endpoint="
            )
        return sockets.ipc(Path(run_dir or default_run_dir()), "front")
    if (fault := endpoints.dial_fault(endpoint)) is not None:
        raise BadRequest(fault)
    return endpoint
