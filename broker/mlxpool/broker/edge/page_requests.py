"""Performs operators' commands from the status page, like commands from the admin socket."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from mlxpool.broker.admin.commands import Commands
from mlxpool.broker.admin.server import AskJobs
from mlxpool.broker.core.state import State
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Content, Header, Message
from mlxpool.common.protocol.from_client import Cancel
from mlxpool.common.protocol.to_client import Failed

if TYPE_CHECKING:
    from mlxpool.broker.http.loop_exchange import Fate, LoopQueue
    from mlxpool.broker.http.operator_routes import Question


# ---- cancels -------------------------------------------------------------------------------------


class PageCancels:
    """Carries out the cancels that operators ask for on the status page.

    Owned by the broker's thread. `waker` is readable if `serve` is due.
    """

    def __init__(self, queue: LoopQueue[str], state: State, commands: Commands) -> None:
        """`state` is only read: `commands` changes it."""
        self.waker = queue.waker
        self._queue = queue
        self._state = state
        self._commands = commands

    def serve(self, now: float) -> None:
        """Performs and answers the waiting commands."""
        self._queue.serve(self.cancel, now)

    def cancel(self, prefix: str, now: float) -> Fate:
        """Cancels the live request whose id begins with the hexadecimal digits `prefix`.

        Raises BadRequest unless exactly one live request has such an id.
        """
        ids = [id for id in self._state.requests if id.hex().startswith(prefix)]
        if not ids:
            raise BadRequest(
                f"no live request has an id that begins with {prefix}: it has ended or never was"
            )
        if len(ids) > 1:
            raise BadRequest(
                f"{len(ids)} live requests have ids that begin with {prefix}:"
                " cancel one with `mlxpool cancel ID`"
            )
        return dict(self._commands.handle(Message(Header(Cancel.kind, ids[0])), now))


# ---- jobs ----------------------------------------------------------------------------------------


class PageJobs:
    """Passes questions about jobs from the status page to the job manager.

    Owned by the broker's thread. `waker` is readable if `serve` is due.
    """

    def __init__(self, queue: LoopQueue[Question], ask: AskJobs) -> None:
        self.waker = queue.waker
        self._queue = queue
        self._ask = ask

    def serve(self, now: float) -> None:
        """Passes the waiting questions to the job manager."""
        self._queue.begin(self._begin, now)

    def _begin(self, question: Question, future: Future[Fate], now: float) -> None:
        def answer(content: Content) -> None:
            if isinstance(content, Failed):
                future.set_exception(content.error())
            else:
                future.set_result(content.body() or {})

        kind, body = question
        self._ask(kind, body, answer, now)
