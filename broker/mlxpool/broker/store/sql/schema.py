"""The tables in the SQL dialects of both databases, and the version of the schema."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.broker.store.records import StoreUnusable
from mlxpool.broker.store.sql.database import Database

VERSION = 6


class Dialect(Struct, frozen=True):
    """The SQL spellings that differ between the databases."""

    blob: str
    text: str  # the type of text that sorts by bytes
    real: str
    integer: str
    numbered: str  # an increasing primary key that never reuses a deleted row's number
    strict: str  # suffix of each table
    clustered: str  # suffix of a table that is stored in primary-key order


SQLITE = Dialect(
    blob="BLOB",
    text="TEXT",
    real="REAL",
    integer="INTEGER",
    numbered="INTEGER PRIMARY KEY AUTOINCREMENT",
    strict="STRICT",
    clustered="STRICT, WITHOUT ROWID",
)
POSTGRES = Dialect(
    blob="BYTEA",
    text='TEXT COLLATE "C"',
    real="DOUBLE PRECISION",
    integer="BIGINT",
    numbered="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    strict="",
    clustered="",
)

# An index of jobs with at least OFTEN_STARTED starts without a durable id. Such jobs are few;
# without the index a search reads all other jobs. A query must contain the number as text.
# It must be created after job_waiting: if two indices fit a query equally, SQLite uses the newer.
OFTEN_STARTED = 3
SUSPECTS = f"""CREATE INDEX job_suspect ON job (model, priority, owner, due, seq)
        WHERE state = 'waiting' AND starts >= {OFTEN_STARTED}"""

# Large columns come last: SQLite reads a row from its begin to the last requested column.
TABLES = (
    """CREATE TABLE meta (
        one {integer} PRIMARY KEY CHECK (one = 1), boot {integer} NOT NULL,
        wall_seen {real} NOT NULL, last_end {integer} NOT NULL
    ) {strict}""",
    """CREATE TABLE job (
        seq {numbered}, id {blob} NOT NULL UNIQUE,
        owner {text} NOT NULL, tenant {text} NOT NULL, key {text} NOT NULL, model {text} NOT NULL,
        priority {integer} NOT NULL, batch {blob}, line {integer} NOT NULL, state TEXT NOT NULL,
        gen {integer} NOT NULL, pos {integer} NOT NULL, starts {integer} NOT NULL,
        size {integer} NOT NULL, due {real} NOT NULL, deadline {real}, forget {real},
        end_seq {integer} UNIQUE, record_crc {integer}, ending_crc {integer}, record {blob},
        ending {blob}, UNIQUE (owner, tenant, key)
    ) {strict}""",
    # Submissions have their own table, because SQLite writes the whole row of a changed job.
    """CREATE TABLE request (
        job {integer} PRIMARY KEY, digest {blob} NOT NULL, kind TEXT NOT NULL,
        seed {integer} NOT NULL, submitted {real} NOT NULL, keep {real}, label TEXT NOT NULL,
        notify TEXT NOT NULL, crc {integer}, data {blob} NOT NULL
    ) {strict}""",
    """CREATE INDEX job_waiting ON job (model, priority, owner, due, seq)
        WHERE state = 'waiting'""",
    SUSPECTS,
    """CREATE INDEX job_deadline ON job (deadline)
        WHERE state = 'waiting' AND deadline IS NOT NULL""",
    "CREATE INDEX job_forget ON job (forget) WHERE forget IS NOT NULL",
    "CREATE INDEX job_state ON job (batch, state) WHERE batch IS NOT NULL",
    "CREATE INDEX job_line ON job (batch, line) WHERE batch IS NOT NULL",
    "CREATE INDEX job_alone ON job (owner, tenant, seq) WHERE batch IS NULL",
    "CREATE INDEX job_counted ON job (state)",
    """CREATE TABLE chunk (
        job {integer} NOT NULL, gen {integer} NOT NULL, pos {integer} NOT NULL, ids {blob} NOT NULL,
        borders {blob} NOT NULL, text {blob} NOT NULL, logprobs {blob} NOT NULL,
        crc {integer} NOT NULL,
        PRIMARY KEY (job, gen, pos)
    ) {clustered}""",
    """CREATE TABLE blob (
        sha {blob} PRIMARY KEY, refs {integer} NOT NULL, data {blob} NOT NULL
    ) {strict}""",
    """CREATE TABLE job_blob (
        job {integer} NOT NULL, place {integer} NOT NULL, sha {blob} NOT NULL,
        PRIMARY KEY (job, place)
    ) {clustered}""",
    """CREATE TABLE usage (
        owner {text} PRIMARY KEY, jobs {integer} NOT NULL, bytes {integer} NOT NULL,
        file_bytes {integer} NOT NULL
    ) {strict}""",
    """CREATE TABLE poison (
        digest {blob} PRIMARY KEY, until {real} NOT NULL
    ) {strict}""",
    # Failures of jobs, see rows.add_failure.
    """CREATE TABLE failure (
        job {integer} NOT NULL, number {integer} NOT NULL, at {real} NOT NULL, cause TEXT NOT NULL,
        stacks TEXT NOT NULL, PRIMARY KEY (job, number)
    ) {clustered}""",
    # Undelivered notices of ends. `body` is the posted JSON.
    """CREATE TABLE outbox (
        end_seq {integer} PRIMARY KEY, kind TEXT NOT NULL, subject {blob} NOT NULL,
        url TEXT NOT NULL, origin {text} NOT NULL, since {real} NOT NULL, tries {integer} NOT NULL,
        due {real} NOT NULL, given_up {real}, cause TEXT NOT NULL, body {blob} NOT NULL
    ) {strict}""",
    "CREATE INDEX outbox_due ON outbox (origin, due, end_seq) WHERE given_up IS NULL",
    """CREATE TABLE file (
        id {blob} PRIMARY KEY, owner {text} NOT NULL, tenant {text} NOT NULL, name TEXT NOT NULL,
        purpose TEXT NOT NULL, size {integer} NOT NULL, complete {integer} NOT NULL,
        created {real} NOT NULL, forget {real}, key TEXT NOT NULL,
        waits_since {real}
    ) {strict}""",
    "CREATE INDEX file_forget ON file (forget) WHERE forget IS NOT NULL",
    """CREATE TABLE file_part (
        file {blob} NOT NULL, start {integer} NOT NULL, data {blob} NOT NULL,
        PRIMARY KEY (file, start)
    ) {strict}""",
    """CREATE TABLE batch (
        id {blob} PRIMARY KEY, owner {text} NOT NULL, tenant {text} NOT NULL, key {text} NOT NULL,
        file {blob} NOT NULL, digest {blob} NOT NULL, defaults {blob} NOT NULL, state TEXT NOT NULL,
        next_line {integer} NOT NULL, next_start {integer} NOT NULL, created {real} NOT NULL,
        ended {real}, deadline {real}, keep {real}, forget {real}, notify TEXT NOT NULL,
        jobs {integer} NOT NULL DEFAULT 0, done {integer} NOT NULL DEFAULT 0,
        cancelled {integer} NOT NULL DEFAULT 0, dead {integer} NOT NULL DEFAULT 0,
        expired {integer} NOT NULL DEFAULT 0, failed {integer} NOT NULL DEFAULT 0,
        end_seq {integer}, deleted {integer} NOT NULL DEFAULT 0, UNIQUE (owner, tenant, key)
    ) {strict}""",
    "CREATE INDEX batch_forget ON batch (forget) WHERE forget IS NOT NULL",
    """CREATE TABLE failed_line (
        batch {blob} NOT NULL, line {integer} NOT NULL, label TEXT NOT NULL, cause TEXT NOT NULL,
        PRIMARY KEY (batch, line)
    ) {clustered}""",
    # List positions of deleted files, for clients that continue a list after such a file.
    """CREATE TABLE deleted_file (
        id {blob} PRIMARY KEY, owner {text} NOT NULL, tenant {text} NOT NULL,
        created {real} NOT NULL, forget {real} NOT NULL
    ) {strict}""",
    "CREATE INDEX deleted_file_forget ON deleted_file (forget)",
    # Indices for pages of files and batches, and for the batches that need a file.
    "CREATE INDEX file_listed ON file (owner, tenant, created, id)",
    "CREATE INDEX file_of_purpose ON file (owner, tenant, purpose, created, id)",
    "CREATE INDEX file_waiting ON file (waits_since) WHERE waits_since IS NOT NULL",
    "CREATE INDEX batch_listed ON batch (owner, tenant, created, id)",
    "CREATE INDEX batch_file ON batch (file)",
)


def create(database: Database, dialect: Dialect) -> None:
    """Creates the tables in an empty database, in one transaction."""
    spelled = {name: getattr(dialect, name) for name in Dialect.__struct_fields__}
    with database.transaction():
        for statement in TABLES:
            database.change(statement.format(**spelled))
        database.change("INSERT INTO meta (one, boot, wall_seen, last_end) VALUES (1, 0, 0, 0)")
        database.write_version(VERSION)


def ensure(database: Database, dialect: Dialect) -> bool:
    """Creates the tables if the database is empty. Returns whether it was empty.

    Raises StoreUnusable if the tables have another version: there are no migrations.
    """
    version = database.read_version()
    if version == VERSION:
        return False
    if version:
        raise StoreUnusable(
            f"the store has schema {version}, this mlxpool reads and writes schema {VERSION} alone:"
            " start the mlxpool that wrote it, or give this one an empty state_dir; jobs are not"
            " carried over (docs/operate.md#jobs)"
        )
    create(database, dialect)
    return True
