"""The step of notices from schema 2, where they were made of their jobs when they were posted."""

from __future__ import annotations

from dataclasses import replace

from mlxpool.broker.store.notice_bodies import job_notice, origin_of
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database

VIEW = f"{rows.VIEW.removesuffix('retried')} NULL"  # of schema 3, which has no such column


def copy_notices(database: Database) -> None:
    """Make the notices of `outbox` of those of `outbox_2`, with what they say."""
    last = 0
    while True:
        found = database.execute(
            "SELECT end_seq, job, tries, due, given_up, cause FROM outbox_2 WHERE end_seq > ?"
            " ORDER BY end_seq LIMIT 500",
            last,
        )
        if not found:
            return
        for end_seq, seq, tries, due, given_up, cause in found:
            row = database.one(f"SELECT {VIEW} FROM job WHERE seq = ?", seq)
            if row is None:
                continue
            job = replace(rows.view(row), end_seq=end_seq)
            database.change(
                "INSERT INTO outbox (end_seq, kind, subject, url, origin, since, tries, due,"
                " given_up, cause, body) VALUES (?, 'job', ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                end_seq,
                job.id,
                job.notify,
                origin_of(job.notify),
                job.ended or due,
                tries,
                due,
                given_up,
                cause,
                job_notice(job),
            )
        last = found[-1][0]
