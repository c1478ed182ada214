"""The outbox: collects the actions of one event, for clients and workers."""

from __future__ import annotations

from mlxpool.broker.core.actions import Action, Note, StopWorker, ToClient, ToWorker
from mlxpool.broker.core.state import State
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta, Deltas, batches
from mlxpool.common.protocol.frames import Content, Header
from mlxpool.common.protocol.to_client import Failed


class Outbox:
    """Deltas of streams with `batch` are merged per link until the event is over.

    Order on a link is kept: another message flushes the merged deltas first.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.actions: list[Action] = []
        self.merged: dict[int, list[Delta]] = {}  # link -> rows of the current event

    def open(self) -> None:
        """Begin an event."""
        self.actions = []

    def close(self) -> list[Action]:
        """End an event; returns its actions in order."""
        for link in list(self.merged):
            self._flush_merged(link)
        return self.actions

    def add(self, action: Action) -> None:
        self.actions.append(action)

    # ---- clients -----------------------------------------------------------------------------

    def send(
        self, link: int, message: Content, id: bytes | None = None, attempt: int = 0, pos: int = 0
    ) -> None:
        """Send to a client, unless its link is lost."""
        if link in self.merged:
            self._flush_merged(link)
        known = self._state.links.get(link)
        if known is None or not known.lost:
            header = Header(message.kind, id, self._state.boot, attempt, pos)
            self.actions.append(ToClient(link, header, message))

    def send_stream(self, request: Request, message: Content, pos: int) -> None:
        """Send on a request's stream."""
        reader = request.reader
        self.send(reader.link, message, request.id, reader.attempt, pos)

    def merge(self, link: int, row: Delta) -> None:
        """Send a row together with others of this event on the same link."""
        self.merged.setdefault(link, []).append(row)

    def complain(self, link: int, error: PoolError, about: bytes | None) -> None:
        """Send an error that ends no stream."""
        self.send(link, Failed.about(error, about))

    def _flush_merged(self, link: int) -> None:
        for rows in batches(self.merged.pop(link)):
            self.send(link, Deltas(rows))

    # ---- workers -----------------------------------------------------------------------------

    def tell(self, worker: Worker, message: Content, id: bytes | None = None, run: int = 0) -> None:
        """Send to a worker; `run` is the number of the run that the message is about."""
        header = Header(message.kind, id, worker.epoch, run)
        self.actions.append(ToWorker(worker.slot, header, message))

    def stop_process(self, worker: Worker, *, at_once: bool = False) -> None:
        self.actions.append(StopWorker(worker.slot, at_once))

    def note_worker(self, level: str, event: str, worker: Worker, **fields: object) -> None:
        """A log line about a worker."""
        known = {"model": worker.model, "worker": worker.slot, "epoch": worker.epoch}
        gpus = {"gpus": ",".join(worker.gpus)} if worker.gpus else {}
        self.actions.append(Note(level, event, {**known, "pid": worker.pid, **gpus, **fields}))
