"""The operations on notices of ends, and on the quarantine of digests."""

from __future__ import annotations

from mlxpool.broker.store.operations import (
    NoticeFailed,
    NoticeSent,
    ReadNotices,
    ReadPoisons,
    SetPoison,
)
from mlxpool.broker.store.records import Done, Notice, Notices, Poisons
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database


def read_notices(database: Database, asked: ReadNotices, now: float) -> Notices:
    due = database.execute(
        "SELECT job, tries, due FROM outbox WHERE due <= ? ORDER BY due, end_seq LIMIT ?",
        now,
        asked.count,
    )
    later = database.one("SELECT due FROM outbox WHERE due > ? ORDER BY due LIMIT 1", now)
    return Notices(
        tuple(Notice(rows.by_seq(database, job), tries, at) for job, tries, at in due),
        None if later is None else later[0],
    )


def notice_sent(database: Database, asked: NoticeSent, now: float) -> Done:
    database.change("DELETE FROM outbox WHERE end_seq = ?", asked.end_seq)
    return Done()


def notice_failed(database: Database, asked: NoticeFailed, now: float) -> Done:
    database.change(
        "UPDATE outbox SET tries = tries + 1, due = ? WHERE end_seq = ?",
        now + asked.delay,
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
