"""The broker's lines in the history file: events and actions, without prompts or texts."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.common.protocol import to_client, to_worker
from mlxpool.common.protocol.deltas import Deltas
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.trace import History


def of_event(history: History, event: ev.Event) -> None:
    """Write the line of an event."""
    write = _EVENTS.get(type(event))
    if write is not None:
        write(history, event)


def of_action(history: History, action: act.Action) -> None:
    """Write the line of an action."""
    if isinstance(action, act.ToClient):
        _to_client(history, action)
    elif isinstance(action, act.ToWorker) and action.header.kind == to_worker.Work.kind:
        header, message = action.header, action.message
        resume = message.resume if isinstance(message, to_worker.Work) else None
        count = 0 if resume is None else resume.count
        history.write(
            "work", id=header.id, slot=action.slot, epoch=header.epoch, run=header.attempt,
            count=count,
        )  # fmt: skip
    elif isinstance(action, act.StartWorker | act.StopWorker | act.DumpStacks):
        history.write(type(action).__name__, slot=action.slot)
    elif isinstance(action, act.Note) and action.event != "request":
        history.write("note", event=action.event, **dict(action.fields))


def _to_client(history: History, action: act.ToClient) -> None:
    header, message = action.header, action.message
    if isinstance(message, Deltas):
        for row in message.rows:
            history.write("sent", id=row.id, attempt=row.attempt, pos=row.pos, n=row.n)
    elif isinstance(message, StreamDelta):
        history.write("sent", id=header.id, attempt=header.attempt, pos=header.pos, n=message.count)
    elif isinstance(message, to_client.Accepted | to_client.Done | to_client.Failed):
        outcome = None
        if isinstance(message, to_client.Done):
            outcome = message.reason
        elif isinstance(message, to_client.Failed):
            outcome = message.code
        history.write(
            header.kind, id=header.id, attempt=header.attempt, pos=header.pos, outcome=outcome
        )


def _rows(history: History, event: ev.WorkerDeltas) -> None:
    for row in event.rows:
        end = None if row.end is None else row.end.get("code") or row.end.get("reason")
        history.write(
            "taken", id=row.id, run=row.attempt, epoch=event.epoch, pos=row.pos, n=row.n,
            end=end,
        )  # fmt: skip


_EVENTS: dict[type, Callable[..., None]] = {
    ev.ClientGenerate: lambda h, e: h.write("generate", id=e.id, attempt=e.attempt, link=e.link),
    ev.StartJob: lambda h, e: h.write("start_job", id=e.id, attempt=e.attempt, alone=e.alone),
    ev.CancelRequest: lambda h, e: h.write("cancel", id=e.id),
    ev.WorkerDeltas: _rows,
    ev.WorkerHello: lambda h, e: h.write("hello", slot=e.slot, epoch=0),
    ev.WorkerYield: lambda h, e: h.write("yield", epoch=e.epoch, runs=len(e.message.runs)),
    ev.WorkerExited: lambda h, e: h.write("exited", slot=e.slot, cause=e.cause, own=e.own),
    ev.LinkLost: lambda h, e: h.write("link_lost", link=e.link),
    ev.Late: lambda h, e: h.write("late", seconds=e.seconds),
}
