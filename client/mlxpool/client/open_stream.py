"""A stream that is open on a connection, and the endpoint that a connection goes to."""

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
    """A stream on its connection: its state, its retries and where its deltas go."""

    state: StreamState
    retry: StreamRetry
    draft: Draft  # as it was sent first
    deadline: float | None  # the user's own, in monotonic seconds
    deliver: Callable[[Delta | None], None]  # called on the connection's thread; None: the end
    read: int = 0  # ids that the reader has taken; written by its thread alone
    owner: str = ""  # on whose behalf it was sent; "": of the client itself
    finished: bool = False  # the reader has seen the end, or has left; written by its thread alone
    acked: int = 0  # ids of which the broker knows that they arrived

    def left(self) -> float | None:
        """Seconds to the user's deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()


def front_endpoint(run_dir: str | Path | None, endpoint: str | None) -> str:
    """The endpoint to connect to. Raises as `Connection` does."""
    if not endpoint:
        if "://" in str(run_dir):
            raise BadRequest(
                f"run_dir is a folder, got {str(run_dir)!r:.200}; give it as endpoint="
            )
        return sockets.ipc(Path(run_dir or default_run_dir()), "front")
    if (fault := endpoints.dial_fault(endpoint)) is not None:
        raise BadRequest(fault)
    return endpoint
