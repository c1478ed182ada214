"""What the broker writes into its history: events in, actions out, without texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxpool.broker.interface import events as ev
from mlxpool.common.protocol import kinds
from mlxpool.common.trace import History


def of_event(history: History, event: ev.Event) -> None:
    """Lines for what happened."""
    write = _EVENTS.get(type(event))
    if write is not None:
        write(history, event)


def of_action(history: History, action: ev.Action) -> None:
    """Lines for what was decided."""
    if isinstance(action, ev.ToClient):
        _to_client(history, action)
    elif isinstance(action, ev.ToWorker) and action.header.kind == kinds.WORK:
        header = action.header
        count = (action.body.get("resume") or {}).get("count", 0)
        history.write(
            "work", id=header.id, slot=action.slot, epoch=header.epoch, run=header.attempt,
            count=count,
        )  # fmt: skip
    elif isinstance(action, ev.StartWorker | ev.StopWorker | ev.DumpStacks):
        history.write(type(action).__name__, slot=action.slot)
    elif isinstance(action, ev.Note) and action.event != "request":
        history.write("note", event=action.event, **dict(action.fields))


def _to_client(history: History, action: ev.ToClient) -> None:
    header, body = action.header, action.body
    if header.kind == kinds.DELTAS:
        for row in body["rows"]:
            history.write("sent", id=row[0], attempt=row[1], pos=row[2], n=row[4])
    elif header.kind == kinds.DELTA:
        history.write("sent", id=header.id, attempt=header.attempt, pos=header.pos, n=body["n"])
    elif header.kind in (kinds.ACCEPTED, kinds.DONE, kinds.ERROR):
        outcome = body.get("reason") or body.get("code")
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


_EVENTS: dict[type, Callable[[History, Any], None]] = {
    ev.Generate: lambda h, e: h.write("generate", id=e.id, attempt=e.attempt, link=e.link),
    ev.Cancel: lambda h, e: h.write("cancel", id=e.id),
    ev.WorkerDeltas: _rows,
    ev.WorkerHello: lambda h, e: h.write("hello", slot=e.slot, epoch=0),
    ev.WorkerYield: lambda h, e: h.write("yield", epoch=e.epoch, runs=len(e.runs or ())),
    ev.WorkerExited: lambda h, e: h.write("exited", slot=e.slot, cause=e.cause, own=e.own),
    ev.LinkLost: lambda h, e: h.write("link_lost", link=e.link),
    ev.Late: lambda h, e: h.write("late", seconds=e.seconds),
}
