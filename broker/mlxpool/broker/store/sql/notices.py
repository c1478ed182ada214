"""The operations on notices (POSTs about ended jobs and batches), and on the quarantine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from mlxpool.broker.store.operations import (
    ListNotices,
    NoticeFailed,
    NoticeSent,
    OriginLoad,
    ReadNotices,
    ReadPoisons,
    SetPoison,
)
from mlxpool.broker.store.records import Done, Notice, Notices, Poisons, Scope
from mlxpool.broker.store.sql import outbox, rows
from mlxpool.broker.store.sql.database import Database, Row

NOTICE = "outbox.end_seq, outbox.kind, outbox.subject"
VALUES = """outbox.url, outbox.origin, outbox.since, outbox.tries, outbox.due, outbox.cause,
    outbox.given_up, outbox.body"""
SCOPE = ", ".join(f"COALESCE(job.{name}, batch.{name})" for name in ("owner", "tenant", "key"))
FROM = """outbox LEFT JOIN job ON outbox.kind = 'job' AND job.id = outbox.subject
    LEFT JOIN batch ON outbox.kind = 'batch' AND batch.id = outbox.subject"""
GIVEN_UP_AT_ONCE = 1000  # the most notices of an unreachable origin that one failed try gives up


def _notice(row: Row) -> Notice:
    """Returns the notice in a query's row with the columns NOTICE, SCOPE and VALUES."""
    end_seq, kind, subject, owner, tenant, key, *others = row
    return Notice(end_seq, kind, subject, Scope(owner, tenant, key), *others)


def read_notices(database: Database, operation: ReadNotices, now: float) -> Notices:
    """Reads due notices. The origins (scheme, host and port of the URL) take turns.

    The number of notices of an origin is limited by the origin's `room` in `operation.loads`.
    """
    loads = {load.origin: load for load in operation.loads}
    waiting: list[tuple[int, float, list[Row]]] = []  # (posts under way, first due, rows)
    later: list[float] = []
    for origin in _origins(database):
        load = loads.get(origin) or OriginLoad(origin, 0, operation.per_origin)
        room = min(operation.count, load.room)
        if room > 0 and (due := _due(database, origin, room, operation.held, now)):
            waiting.append((load.under_way, due[0][1], due))
        row = database.one(
            "SELECT due FROM outbox WHERE origin = ? AND due > ? AND given_up IS NULL"
            " ORDER BY due LIMIT 1",
            origin,
            now,
        )
        later += [] if row is None else [row[0]]
    waiting.sort(key=lambda entry: entry[:2])
    turns = itertools.chain.from_iterable(itertools.zip_longest(*(entry[2] for entry in waiting)))
    numbers = itertools.islice((row[0] for row in turns if row is not None), operation.count)
    notices = [
        _notice(row)
        for number in numbers
        for row in database.execute(
            f"SELECT {NOTICE}, {SCOPE}, {VALUES} FROM {FROM} WHERE outbox.end_seq = ?", number
        )
    ]
    return Notices(tuple(notices), min(later, default=None), now)


def _origins(database: Database) -> Iterator[str]:
    """Yields the origins of undelivered notices. Each origin costs one index look-up."""
    last = ""
    while True:
        row = database.one(
            "SELECT origin FROM outbox WHERE origin > ? AND given_up IS NULL"
            " ORDER BY origin LIMIT 1",
            last,
        )
        if row is None:
            return
        last = row[0]
        yield last


def _due(database: Database, origin: str, room: int, held: frozenset[int], now: float) -> list[Row]:
    """Returns (end_seq, due) of at most `room` due notices of an origin, the earliest due first.

    Leaves out the notices in `held`, which are being delivered.
    """
    stored = database.execute(
        "SELECT end_seq, due FROM outbox WHERE origin = ? AND due <= ? AND given_up IS NULL"
        " ORDER BY due, end_seq LIMIT ?",
        origin,
        now,
        room + len(held),
    )
    return [row for row in stored if row[0] not in held][:room]


def list_notices(database: Database, operation: ListNotices, now: float) -> Notices:
    owner = "" if operation.owner is None else " AND COALESCE(job.owner, batch.owner) = ?"
    stored = database.execute(
        f"SELECT {NOTICE}, {SCOPE}, {VALUES} FROM {FROM} WHERE outbox.end_seq > ?{owner}"
        " ORDER BY outbox.end_seq LIMIT ?",
        operation.after,
        *(() if operation.owner is None else (operation.owner,)),
        operation.count,
    )
    return Notices(tuple(map(_notice, stored)), None, now)


def notice_sent(database: Database, operation: NoticeSent, now: float) -> Done:
    outbox.drop(database, operation.end_seq)
    return Done()


def notice_failed(database: Database, operation: NoticeFailed, now: float) -> Done:
    cause = rows.storable(operation.cause)
    database.change(
        "UPDATE outbox SET tries = tries + 1, due = ?, given_up = ?, cause = ? WHERE end_seq = ?",
        now + (operation.delay or 0.0),
        now if operation.delay is None else None,
        cause,
        operation.end_seq,
    )
    if operation.unreachable:
        database.change(
            "UPDATE outbox SET given_up = ?, cause = ? WHERE end_seq IN (SELECT end_seq FROM outbox"
            " WHERE origin = ? AND given_up IS NULL AND since < ? LIMIT ?)",
            now,
            cause,
            operation.unreachable,
            now - operation.give_up_after,
            GIVEN_UP_AT_ONCE,
        )
    return Done()


def set_poison(database: Database, operation: SetPoison, now: float) -> Done:
    if operation.life <= 0:
        database.change("DELETE FROM poison WHERE digest = ?", operation.digest)
    else:
        database.change(
            "INSERT INTO poison (digest, until) VALUES (?, ?)"
            " ON CONFLICT (digest) DO UPDATE SET until = excluded.until",
            operation.digest,
            now + operation.life,
        )
    return Done()


def read_poisons(database: Database, operation: ReadPoisons, now: float) -> Poisons:
    stored = database.execute(
        "SELECT digest, until FROM poison WHERE until > ? ORDER BY until", now
    )
    return Poisons(tuple((digest, until - now) for digest, until in stored))
