"""A client's one connection, as its users see it: commands from any thread to the session's."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlxpool.client.dealer import Dealer
from mlxpool.client.open_stream import OpenStream
from mlxpool.client.request import Question
from mlxpool.client.retry import Pace
from mlxpool.client.session import Session
from mlxpool.common.errors import BrokerLost, PoolError
from mlxpool.common.paths import default_run_dir
from mlxpool.common.protocol import to_broker
from mlxpool.common.protocol.frames import encoded
from mlxpool.common.protocol.to_broker import GenerateDraft
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets
from mlxpool.common.transport.keys import Credentials

ACK_IDS = 64  # ids read before an ack goes out; the rest follows with the next ping

Answer = TypeVar("Answer")


class Connection:
    """Starts the session's thread with the first command; `close` ends it."""

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        pace: Pace | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Raises ValueError for a run directory whose path is too long for a socket."""
        self.endpoint = endpoint or sockets.ipc(Path(run_dir or default_run_dir()), "front")
        self.pace = pace or Pace()
        self._credentials = credentials
        self._commands: queue.SimpleQueue[Callable[[Session], None]] = queue.SimpleQueue()
        self._history = History("client")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._thread: threading.Thread | None = None

    def open(self, stream: OpenStream, draft: GenerateDraft) -> None:
        """Send a stream's `generate`. Raises TooLarge or BadRequest for what cannot be sent."""
        parts = encoded(draft, stream.state.id, attempt=stream.state.attempt)
        stream.begin(draft, self.pace)
        self._do(lambda session: session.open(stream, parts))

    def cancel(self, stream: OpenStream) -> None:
        """Cancel a stream whose reader has left. A closed connection has cancelled it already."""
        with contextlib.suppress(BrokerLost):
            self._do(lambda session: session.cancel(stream))

    def ask(
        self, question: Question[Answer], on_reply: Callable[[Answer | PoolError], None]
    ) -> None:
        """Send a call; `on_reply` gets the answer, or an error, on the connection's thread."""
        ident, kind = question.id, question.content.kind
        parts = encoded(question.content, ident)

        def command(session: Session) -> None:
            session.calls.ask(
                ident,
                kind,
                parts,
                lambda reply: on_reply(question.answer(reply)),
                session.timer.now,
            )
            if kind == to_broker.Cancel.kind:
                session.cancel_asked(ident)

        self._do(command)

    def forget(self, question: Question[Answer]) -> None:
        """Drop a call whose caller no longer waits."""
        self._do(lambda session: session.calls.forget(question.id))

    def took(self, stream: OpenStream, ids: int) -> None:
        """The reader took so many more ids."""
        stream.read += ids
        if stream.read - stream.acked >= ACK_IDS:
            self._do(lambda session: session.acknowledge())

    def close(self) -> None:
        """End the thread. Open streams are cancelled and end with BrokerLost."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._closing.set()
        if self._session is not None:
            self._session.wake()
        if thread is None:
            self._history.close()
        elif thread is not threading.current_thread():
            thread.join(timeout=5)

    def _do(self, command: Callable[[Session], None]) -> None:
        """Have the session's thread run a command. Raises BrokerLost after `close`."""
        with self._lock:
            if self._closing.is_set():
                raise BrokerLost("the client is closed")
            if self._session is None:
                self._session = self._start()
            session = self._session
            self._commands.put(command)
        session.wake()

    def _start(self) -> Session:
        """Open the socket and start the thread. Raises OSError for a malformed endpoint."""
        dealer = Dealer(self.endpoint, self._credentials)
        session = Session(dealer, self.pace, self._commands, self._closing, self._history)
        self._thread = threading.Thread(target=session.run, name="mlxpool", daemon=True)
        self._thread.start()
        return session
