"""Performs the cancels that operators ask for on the status page, as `mlxpool cancel` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxpool.broker.admin.commands import Commands
from mlxpool.broker.core.state import State
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import Cancel

if TYPE_CHECKING:
    from mlxpool.broker.http.loop_queue import Fate, LoopQueue


class PageCancels:
    """Owned by the broker's thread. `waker` is readable when `serve` is due."""

    def __init__(self, queue: LoopQueue[str], state: State, commands: Commands) -> None:
        """`state` is only read: the command changes it."""
        self.waker = queue.waker
        self._queue = queue
        self._state = state
        self._commands = commands

    def serve(self, now: float) -> None:
        """Answer what waits in the queue."""
        self._queue.serve(self.cancel, now)

    def cancel(self, prefix: str, now: float) -> Fate:
        """Cancel the live request whose id begins so. Raises BadRequest if there is not one."""
        found = [id for id in self._state.requests if id.hex().startswith(prefix)]
        if not found:
            raise BadRequest(
                f"no live request has an id that begins with {prefix}: it has ended or never was"
            )
        if len(found) > 1:
            raise BadRequest(
                f"{len(found)} live requests have ids that begin with {prefix}:"
                " cancel one with `mlxpool cancel ID`"
            )
        return dict(self._commands.handle(Message(Header(Cancel.kind, found[0])), now))
