"""An audit of a job store: counts must match rows, and every row must be referenced."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[str], list[Any]]  # a function: an SQL statement -> its rows

USAGE = """SELECT usage.owner, usage.jobs, usage.bytes,
    (SELECT COUNT(*) FROM job WHERE job.owner = usage.owner AND state <> 'gone') AS jobs_found,
    COALESCE((SELECT SUM(size) FROM job WHERE job.owner = usage.owner), 0)
    + COALESCE((SELECT SUM(size) FROM file WHERE file.owner = usage.owner), 0) AS bytes_found
    FROM usage"""
# Lines that were cut off by the deadline of a batch count as expired jobs.
COUNTS = """SELECT key, state, jobs, done + cancelled + dead + expired AS ended,
    (SELECT COUNT(*) FROM job WHERE job.batch = batch.id) + cut_off AS jobs_found,
    (SELECT COUNT(*) FROM job WHERE job.batch = batch.id AND job.state <> 'waiting') + cut_off
    AS ended_found, failed,
    (SELECT COUNT(*) FROM failed_line WHERE failed_line.batch = batch.id) - cut_off AS failed_found
    FROM (SELECT batch.*, (SELECT COUNT(*) FROM failed_line WHERE failed_line.batch = batch.id
    AND cause LIKE 'deadline_exceeded: %') AS cut_off FROM batch) AS batch WHERE state <> 'gone'"""
OUTPUT = """SELECT id, pos, size, state,
    COALESCE((SELECT SUM(LENGTH(ids)) FROM chunk WHERE job = seq AND chunk.gen = job.gen), 0) / 4
    FROM job"""
# Each statement finds rows whose counterpart in another table is missing.
ORPHANS = {
    "chunks without a job": "SELECT job FROM chunk WHERE job NOT IN (SELECT seq FROM job)",
    "chunks of an earlier generation": (
        "SELECT job FROM chunk JOIN job ON job.seq = chunk.job WHERE chunk.gen <> job.gen"
    ),
    "blobs without a job": "SELECT refs FROM blob WHERE refs <> "
    "(SELECT COUNT(*) FROM job_blob WHERE job_blob.sha = blob.sha)",
    "blobs of no job": "SELECT job FROM job_blob WHERE job NOT IN (SELECT seq FROM job)",
    "jobs without a request": "SELECT seq FROM job WHERE seq NOT IN (SELECT job FROM request)",
    "requests without a job": "SELECT job FROM request WHERE job NOT IN (SELECT seq FROM job)",
    "failures without a job": "SELECT job FROM failure WHERE job NOT IN (SELECT seq FROM job)",
    "parts without a file": "SELECT file FROM file_part WHERE file NOT IN (SELECT id FROM file)",
    "notices of no job and no batch": (
        "SELECT end_seq FROM outbox WHERE subject NOT IN (SELECT id FROM job)"
        " AND subject NOT IN (SELECT id FROM batch)"
    ),
    "ends that two jobs have": (
        "SELECT end_seq FROM job WHERE end_seq IS NOT NULL GROUP BY end_seq HAVING COUNT(*) > 1"
    ),
    "ended jobs without a number": (
        "SELECT id FROM job WHERE (state = 'waiting') <> (end_seq IS NULL)"
    ),
    "lines that two jobs have": (
        "SELECT batch FROM job WHERE batch IS NOT NULL GROUP BY batch, line HAVING COUNT(*) > 1"
    ),
    "lines that are a job and failed": (
        "SELECT job.line FROM job JOIN failed_line"
        " ON failed_line.batch = job.batch AND failed_line.line = job.line"
    ),
}


def audit(run: Run) -> list[str]:
    """Returns the faults, one sentence each; `run` performs a statement on the store."""
    faults = [f"usage of {owner}: {counted} of {real}" for owner, counted, real in _usage(run)]
    for key, state, jobs, ended, jobs_found, ended_found, failed, failed_found in run(COUNTS):
        counted, real = (jobs, ended, failed), (jobs_found, ended_found, failed_found)
        if counted != real:
            faults.append(f"batch {key} ({state}) counts jobs, ended, failed {counted}, has {real}")
    for id, pos, size, state, ids in run(OUTPUT):
        expected = 0 if state == "gone" else pos
        if ids != expected or size < 0:
            faults.append(f"job {bytes(id).hex()} ({state}) of {pos} ids has {ids}, {size} bytes")
    for what, sql in ORPHANS.items():
        rows = run(sql)
        if rows:
            faults.append(f"{what}: {len(rows)}")
    return faults


def _usage(run: Run) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    rows = [
        (owner, (jobs, size), (int(jobs_found), int(bytes_found)))
        for owner, jobs, size, jobs_found, bytes_found in run(USAGE)
    ]
    return [row for row in rows if row[1] != row[2]]


def audit_folder(state_dir: Path) -> list[str]:
    """Returns the faults of a folder that no broker has open, with SQLite's integrity check."""
    (path,) = state_dir.glob("jobs-*.db")
    connection = sqlite3.connect(path)
    try:
        faults = audit(lambda sql: connection.execute(sql).fetchall())
        whole = connection.execute("PRAGMA integrity_check").fetchall()
    finally:
        connection.close()
    return faults if whole == [("ok",)] else [*faults, f"integrity_check: {whole}"]


def audit_postgres(url: str) -> list[str]:
    """Returns the faults of a schema in PostgreSQL."""
    import psycopg

    with psycopg.connect(url) as connection:
        return audit(lambda sql: connection.execute(sql.encode()).fetchall())
