"""The operations on files, which are stored in parts."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.store.batch_operations import (
    AppendFile,
    CreateFile,
    DeleteFile,
    ListFiles,
    ReadFile,
)
from mlxpool.broker.store.batch_records import FileDiffers, FileList, FilePart, FileView
from mlxpool.broker.store.records import Refused, Result, Scope, UnknownName
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database, Row
from mlxpool.broker.store.sql.submitting import check_names

PART = 256 * 1024  # bytes of a stored part at most
VIEW = "id, owner, tenant, key, name, purpose, size, complete, created, forget"


def view(row: Row) -> FileView:
    """The file of a row of the columns VIEW."""
    fields: Any = (*row[:7], bool(row[7]), *row[8:])
    return FileView(*fields)


def find(database: Database, id: bytes, owner: str | None, tenant: str | None) -> FileView | None:
    """The file with this id; None if there is none, or another owner's or tenant's."""
    row = database.one(f"SELECT {VIEW} FROM file WHERE id = ?", id)
    if row is None:
        return None
    file = view(row)
    fits = owner in (None, file.owner) and tenant in (None, file.tenant)
    return file if fits else None


def create_file(database: Database, asked: CreateFile, now: float) -> FileView:
    """Begin a file; an id that is there already is answered as it is."""
    check_names(Scope(asked.owner, asked.tenant, asked.key), asked.name, asked.purpose)
    database.change(
        "INSERT INTO file (id, owner, tenant, key, name, purpose, size, complete, created,"
        " forget) VALUES (?, ?, ?, ?, ?, ?, 0, 0, ?, ?) ON CONFLICT (id) DO NOTHING",
        asked.id,
        asked.owner,
        asked.tenant,
        asked.key,
        asked.name,
        asked.purpose,
        now,
        None if asked.keep is None else now + asked.keep,
    )
    file = find(database, asked.id, asked.owner, asked.tenant)
    if file is None:
        raise ValueError(f"the id {asked.id.hex()} is a file of another owner")
    return file


def append_file(database: Database, asked: AppendFile, now: float, room: int) -> Result:
    """Append what is new of a part."""
    file = find(database, asked.id, asked.owner, asked.tenant)
    if file is None:
        return UnknownName()
    if asked.start > file.size:
        return file
    known = min(len(asked.data), file.size - asked.start)
    if read_from(database, asked.id, asked.start, known) != asked.data[:known]:
        return FileDiffers(file, asked.start)
    ends = asked.start + len(asked.data)
    if asked.last and ends < file.size:
        return FileDiffers(file, asked.start)
    if file.complete:
        return FileDiffers(file, asked.start) if ends > file.size else file
    data = memoryview(asked.data)[known:]
    if len(data) > room:
        return Refused(
            "store_full", f"the store has room for {max(0, room)} bytes, this part has {len(data)}"
        )
    for start in range(0, len(data), PART):
        database.change(
            "INSERT INTO file_part (file, start, data) VALUES (?, ?, ?)",
            asked.id,
            file.size + start,
            bytes(data[start : start + PART]),
        )
    database.change(
        "UPDATE file SET size = size + ?, complete = ? WHERE id = ?",
        len(data),
        int(asked.last),
        asked.id,
    )
    rows.count_usage(database, file.owner, 0, len(data))
    found = find(database, asked.id, None, None)
    assert found is not None
    return found


def read_from(database: Database, id: bytes, start: int, max_bytes: int) -> bytes:
    """Bytes of a file from `start` on; fewer than `max_bytes` only at its end."""
    data = bytearray()
    while len(data) < max_bytes:
        at = start + len(data)
        row = database.one(
            "SELECT start, data FROM file_part WHERE file = ? AND start <= ?"
            " ORDER BY start DESC LIMIT 1",
            id,
            at,
        )
        part = b"" if row is None else row[1][at - row[0] :]
        if not part:
            break
        data += part[: max_bytes - len(data)]
    return bytes(data)


def read_file(database: Database, asked: ReadFile, now: float) -> Result:
    file = find(database, asked.id, asked.owner, asked.tenant)
    if file is None:
        return UnknownName()
    return FilePart(file, asked.start, read_from(database, file.id, asked.start, asked.max_bytes))


def list_files(database: Database, asked: ListFiles, now: float) -> FileList:
    found = database.execute(
        f"SELECT {VIEW} FROM file WHERE owner = ? AND tenant = ? ORDER BY created DESC, id LIMIT ?",
        asked.owner,
        asked.tenant,
        asked.count,
    )
    return FileList(tuple(map(view, found)))


def delete_file(database: Database, asked: DeleteFile, now: float) -> Result:
    file = find(database, asked.id, asked.owner, asked.tenant)
    if file is None:
        return UnknownName()
    if is_read(database, file.id):
        return Refused("in_use", "an open batch reads this file; cancel the batch first")
    drop(database, file)
    return file


def is_read(database: Database, id: bytes) -> bool:
    """Whether lines of a file are still to become jobs."""
    return database.one("SELECT 1 FROM batch WHERE file = ? AND state = 'open'", id) is not None


def drop(database: Database, file: FileView) -> None:
    """Delete a file and its parts."""
    database.change("DELETE FROM file_part WHERE file = ?", file.id)
    database.change("DELETE FROM file WHERE id = ?", file.id)
    rows.count_usage(database, file.owner, 0, -file.size)
