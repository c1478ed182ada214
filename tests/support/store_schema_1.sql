-- The tables of the store's schema 1 in SQLite, from which later ones are made.
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), boot INTEGER NOT NULL,
    wall_seen REAL NOT NULL, last_end INTEGER NOT NULL
) STRICT;
CREATE TABLE job (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB NOT NULL UNIQUE,
    owner TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    digest BLOB NOT NULL, gen INTEGER NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL,
    priority INTEGER NOT NULL, seed INTEGER NOT NULL, state TEXT NOT NULL,
    pos INTEGER NOT NULL, starts INTEGER NOT NULL, attempts INTEGER NOT NULL,
    charge REAL NOT NULL, submitted REAL NOT NULL, due REAL NOT NULL, deadline REAL,
    keep REAL, forget REAL, ended REAL, end_seq INTEGER UNIQUE, size INTEGER NOT NULL,
    batch BLOB, line INTEGER NOT NULL, label TEXT NOT NULL, notify TEXT NOT NULL,
    cause TEXT NOT NULL, facts BLOB, ending BLOB, request BLOB NOT NULL,
    UNIQUE (owner, tenant, key)
) STRICT;
CREATE INDEX job_waiting ON job (model, priority, owner, due, seq)
    WHERE state = 'waiting';
CREATE INDEX job_deadline ON job (deadline)
    WHERE state = 'waiting' AND deadline IS NOT NULL;
CREATE INDEX job_forget ON job (forget) WHERE forget IS NOT NULL;
CREATE INDEX job_state ON job (batch, state) WHERE batch IS NOT NULL;
CREATE INDEX job_line ON job (batch, line) WHERE batch IS NOT NULL;
CREATE TABLE chunk (
    job INTEGER NOT NULL, gen INTEGER NOT NULL, pos INTEGER NOT NULL, ids BLOB NOT NULL,
    borders BLOB NOT NULL, text BLOB NOT NULL, logprobs BLOB NOT NULL,
    PRIMARY KEY (job, gen, pos)
) STRICT, WITHOUT ROWID;
CREATE TABLE blob (
    sha BLOB PRIMARY KEY, refs INTEGER NOT NULL, data BLOB NOT NULL
) STRICT;
CREATE TABLE job_blob (
    job INTEGER NOT NULL, place INTEGER NOT NULL, sha BLOB NOT NULL,
    PRIMARY KEY (job, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
    owner TEXT PRIMARY KEY, jobs INTEGER NOT NULL, bytes INTEGER NOT NULL
) STRICT;
CREATE TABLE poison (
    digest BLOB PRIMARY KEY, until REAL NOT NULL
) STRICT;
CREATE TABLE outbox (
    end_seq INTEGER PRIMARY KEY, job INTEGER NOT NULL, tries INTEGER NOT NULL,
    due REAL NOT NULL
) STRICT;
CREATE INDEX outbox_due ON outbox (due);
CREATE TABLE file (
    id BLOB PRIMARY KEY, owner TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, size INTEGER NOT NULL, complete INTEGER NOT NULL,
    created REAL NOT NULL, forget REAL
) STRICT;
CREATE INDEX file_forget ON file (forget) WHERE forget IS NOT NULL;
CREATE TABLE file_part (
    file BLOB NOT NULL, start INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (file, start)
) STRICT;
CREATE TABLE batch (
    id BLOB PRIMARY KEY, owner TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    file BLOB NOT NULL, digest BLOB NOT NULL, defaults BLOB NOT NULL, state TEXT NOT NULL,
    next_line INTEGER NOT NULL, next_start INTEGER NOT NULL, created REAL NOT NULL,
    ended REAL, deadline REAL, keep REAL, forget REAL, notify TEXT NOT NULL,
    UNIQUE (owner, tenant, key)
) STRICT;
CREATE INDEX batch_forget ON batch (forget) WHERE forget IS NOT NULL;
CREATE TABLE failed_line (
    batch BLOB NOT NULL, line INTEGER NOT NULL, label TEXT NOT NULL, cause TEXT NOT NULL,
    PRIMARY KEY (batch, line)
) STRICT, WITHOUT ROWID;
INSERT INTO meta (one, boot, wall_seen, last_end) VALUES (1, 0, 0, 0);
PRAGMA user_version = 1;
