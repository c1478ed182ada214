"""The operations on notices of ends, and on the quarantine of digests."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.broker.store.operations import (
    ListNotices,
    NoticeFailed,
    NoticeSent,
    ReadNotices,
    ReadPoisons,
    SetPoison,
)
from mlxpool.broker.store.records import Done, Notice, Notices, Poisons
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database, Row

NOTICE = "job, end_seq, tries, due, cause, given_up"


def read_notices(database: Database, asked: ReadNotices, now: float) -> Notices:
    due = database.execute(
        f"SELECT {NOTICE} FROM outbox WHERE due <= ? AND given_up IS NULL"
        " ORDER BY due, end_seq LIMIT ?",
        now,
        asked.count + len(asked.held),
    )
    free = [row for row in due if row[1] not in asked.held][: asked.count]
    later = database.one(
        "SELECT due FROM outbox WHERE due > ? AND given_up IS NULL ORDER BY due LIMIT 1", now
    )
    return Notices(_notices(database, free), None if later is None else later[0], now)


def list_notices(database: Database, asked: ListNotices, now: float) -> Notices:
    owner = "" if asked.owner is None else " AND owner = ?"
    found = database.execute(
        f"SELECT {', '.join('outbox.' + name for name in NOTICE.split(', '))}"
        f" FROM outbox JOIN job ON job.seq = outbox.job WHERE outbox.end_seq > ?{owner}"
        " ORDER BY outbox.end_seq LIMIT ?",
        asked.after,
        *(() if asked.owner is None else (asked.owner,)),
        asked.count,
    )
    return Notices(_notices(database, found), None, now)


def _notices(database: Database, found: Iterable[Row]) -> tuple[Notice, ...]:
    return tuple(Notice(rows.by_seq(database, job), *others) for job, *others in found)


def notice_sent(database: Database, asked: NoticeSent, now: float) -> Done:
    database.change("DELETE FROM outbox WHERE end_seq = ?", asked.end_seq)
    return Done()


def notice_failed(database: Database, asked: NoticeFailed, now: float) -> Done:
    database.change(
        "UPDATE outbox SET tries = tries + 1, due = ?, given_up = ?, cause = ? WHERE end_seq = ?",
        now + (asked.delay or 0.0),
        now if asked.delay is None else None,
        rows.storable(asked.cause),
        asked.end_seq,
    )
    return Done()


def set_poison(database: Database, asked: SetPoison, now: float) -> Done:
    if asked.life <= 0:
        database.change("DELETE FROM poison WHERE digest = ?", asked.digest)
    else:
        database.change(
            "INSERT INTO poison (digest, until) VALUES (?, ?)"
            " ON CONFLICT (digest) DO UPDATE SET until = excluded.until",
            asked.digest,
            now + asked.life,
        )
    return Done()


def read_poisons(database: Database, asked: ReadPoisons, now: float) -> Poisons:
    found = database.execute("SELECT digest, until FROM poison WHERE until > ? ORDER BY until", now)
    return Poisons(tuple((digest, until - now) for digest, until in found))
