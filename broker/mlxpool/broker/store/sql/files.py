"""The operations on files. A file is stored in parts."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from mlxpool.broker.store.batch_operations import (
    AppendFile,
    CreateFile,
    DeleteFile,
    FileDiffers,
    FileList,
    FilePart,
    FileView,
    ListFiles,
    Outcomes,
    ReadFile,
)
from mlxpool.broker.store.records import Refused, Result, Scope, UnknownName
from mlxpool.broker.store.sql import rows
from mlxpool.broker.store.sql.database import Database
from mlxpool.broker.store.sql.submitting import check_names
from mlxpool.common.protocol.kept.file_messages import LINES_PURPOSE

PART = 256 * 1024  # most bytes of a stored part
# Seconds between the last part of an abandoned file and its deletion. A file is abandoned if it is
# incomplete, or if a gateway wrote it for a batch that was never made.
UPLOAD_LIFE = 3600.0
SWEPT = 4  # most expired, and most abandoned, files that a sweep deletes: a file may have 1 GiB
DELETED_LIFE = 3600.0  # seconds for which the list position of a deleted file is kept
# The condition under which a batch needs its file: lines are still to become jobs, or a gateway
# wrote the file and reads it together with the results.
NEEDED = (
    "batch.file = file.id AND (batch.state = 'open'"
    f" OR file.purpose = '{LINES_PURPOSE}' AND batch.state <> 'gone'"
    f" AND batch.deleted <> {int(Outcomes.DONE | Outcomes.OTHERS)})"
)
COLUMNS = FileView.__struct_fields__  # FileView has the columns of the table `file`


def select(database: Database, condition: str, *values: Any) -> list[FileView]:
    """Returns the files that meet an SQL condition, which may end with ORDER BY and LIMIT."""
    stored = database.execute(f"SELECT {', '.join(COLUMNS)} FROM file WHERE {condition}", *values)
    named = (dict(zip(COLUMNS, row, strict=True)) for row in stored)
    return [FileView(**{**columns, "complete": bool(columns["complete"])}) for columns in named]


def find(database: Database, id: bytes, owner: str | None, tenant: str | None) -> FileView | None:
    """Returns the file with this id; None if the owner and tenant have no such file."""
    files = select(database, "id = ?", id)
    if not files or owner not in (None, files[0].owner) or tenant not in (None, files[0].tenant):
        return None
    return files[0]


def create_file(database: Database, operation: CreateFile, now: float, room: int) -> Result:
    """Creates a file with its first part.

    If the file exists, appends those bytes of the part that the file lacks.
    """
    check_names(
        Scope(operation.owner, operation.tenant, operation.key), operation.name, operation.purpose
    )
    part = AppendFile(
        operation.id,
        operation.owner,
        operation.tenant,
        0,
        operation.data,
        operation.last,
        operation.max_bytes,
    )
    if find(database, operation.id, operation.owner, operation.tenant) is None:
        refused = _no_room(database, part, len(part.data) + rows.ROW_BYTES, room)
        if refused is not None:
            return refused
        _insert(database, operation, now)
    return append_file(database, part, now, room)


def _insert(database: Database, operation: CreateFile, now: float) -> None:
    added = database.change(
        "INSERT INTO file (id, owner, tenant, key, name, purpose, size, complete, created,"
        " forget, waits_since) VALUES (?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?)"
        " ON CONFLICT (id) DO NOTHING",
        operation.id,
        operation.owner,
        operation.tenant,
        operation.key,
        operation.name,
        operation.purpose,
        now,
        None if operation.keep is None else now + operation.keep,
        now,
    )
    if not added:
        raise ValueError(f"the id {operation.id.hex()} is a file of another owner")
    rows.count_usage(database, operation.owner, 0, 0, rows.ROW_BYTES)


def _no_room(database: Database, part: AppendFile, size: int, room: int) -> Refused | None:
    """Returns the refusal of a part that adds `size` bytes; None if there is room for it."""
    if len(part.data) > room:
        return Refused(
            "store_full",
            f"the store has room for {max(0, room)} bytes, this part has {len(part.data)}",
        )
    if not part.max_bytes:
        return None
    used = database.number("SELECT file_bytes FROM usage WHERE owner = ?", part.owner)
    if used + size <= part.max_bytes:
        return None
    return Refused(
        "over_quota",
        f"the files of this owner have {used} bytes, with this part {used + size}, at most"
        f" {part.max_bytes} (quota_file_bytes); delete files that are not needed (mlxpool release"
        " --file, or DELETE /v1/files/ID), or release batches that were made over HTTP, whose lines"
        " are files too",
        used + size,
        part.max_bytes,
    )


def append_file(database: Database, operation: AppendFile, now: float, room: int) -> Result:
    """Appends those bytes of a part that the file lacks."""
    file = find(database, operation.id, operation.owner, operation.tenant)
    if file is None:
        return UnknownName()
    if operation.start > file.size:
        return file
    known = min(len(operation.data), file.size - operation.start)
    if read_from(database, operation.id, operation.start, known) != operation.data[:known]:
        return FileDiffers(file, operation.start)
    ends = operation.start + len(operation.data)
    if operation.last and ends < file.size:
        return FileDiffers(file, operation.start)
    if file.complete:
        return FileDiffers(file, operation.start) if ends > file.size else file
    data = operation.data[known:]
    refused = _no_room(database, replace(operation, data=data), len(data), room)
    if refused is not None:
        return refused
    for start in range(0, len(data), PART):
        database.change(
            "INSERT INTO file_part (file, start, data) VALUES (?, ?, ?)",
            operation.id,
            file.size + start,
            data[start : start + PART],
        )
    database.change(
        "UPDATE file SET size = size + ?, complete = ?, waits_since = ?,"
        " forget = COALESCE(created + ?, forget) WHERE id = ?",
        len(data),
        int(operation.last),
        None if operation.last and file.purpose != LINES_PURPOSE else now,
        operation.keep,
        operation.id,
    )
    rows.count_usage(database, file.owner, 0, len(data), len(data))
    appended = find(database, operation.id, None, None)
    assert appended is not None
    return appended


def read_from(database: Database, id: bytes, start: int, max_bytes: int) -> bytes:
    """Returns bytes of a file from `start` on; fewer than `max_bytes` only at the file's end."""
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


def read_file(database: Database, operation: ReadFile, now: float) -> Result:
    file = find(database, operation.id, operation.owner, operation.tenant)
    if file is None:
        return _unknown(database, operation)
    return FilePart(
        file, operation.start, read_from(database, file.id, operation.start, operation.max_bytes)
    )


def _unknown(database: Database, operation: ReadFile) -> UnknownName:
    """Returns UnknownName. It has the time of creation if the file was deleted recently."""
    row = database.one(
        "SELECT created FROM deleted_file WHERE id = ? AND owner = ? AND tenant = ?",
        operation.id,
        operation.owner,
        operation.tenant,
    )
    return UnknownName(None if row is None else row[0])


def list_files(database: Database, operation: ListFiles, now: float) -> FileList:
    where, values = ["owner = ?", "tenant = ?"], list[Any]([operation.owner, operation.tenant])
    if operation.purpose:
        where.append("purpose = ?")
        values.append(operation.purpose)
    sign, order = (">", "ASC") if operation.oldest_first else ("<", "DESC")
    if operation.behind is not None:
        where.append(f"(created, id) {sign} (?, ?)")
        values += operation.behind
    condition = f"{' AND '.join(where)} ORDER BY created {order}, id {order} LIMIT ?"
    files = select(database, condition, *values, operation.count + 1)
    return FileList(tuple(files[: operation.count]), len(files) > operation.count)


def delete_file(database: Database, operation: DeleteFile, now: float) -> Result:
    file = find(database, operation.id, operation.owner, operation.tenant)
    if file is None:
        return UnknownName()
    if (why := _needed_for(database, file)) is not None:
        return Refused("in_use", why)
    drop(database, file)
    if file.complete:
        database.change(
            "INSERT INTO deleted_file (id, owner, tenant, created, forget) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET created = excluded.created, forget = excluded.forget",
            file.id,
            file.owner,
            file.tenant,
            file.created,
            now + DELETED_LIFE,
        )
    return file


def _needed_for(database: Database, file: FileView) -> str | None:
    """Returns why a batch still needs a file; None if no batch needs it."""
    batch = database.one(
        f"SELECT batch.state FROM batch, file WHERE file.id = ? AND {NEEDED} LIMIT 1", file.id
    )
    if batch is None:
        return None
    if file.purpose == LINES_PURPOSE:
        return (
            "the results of a batch are read together with this file; release the batch, which"
            " deletes the file (mlxpool release --batch)"
        )
    return "an open batch reads this file; cancel the batch first"


def let_go(database: Database, batch: bytes, now: float) -> None:
    """Marks a batch's file for deletion, if its purpose is LINES_PURPOSE.

    The pool keeps a file of this purpose only as long as the results of its batch.
    """
    database.change(
        "UPDATE file SET forget = ? WHERE purpose = ?"
        " AND id = (SELECT file FROM batch WHERE batch.id = ?)",
        now,
        LINES_PURPOSE,
        batch,
    )


def drop(database: Database, file: FileView) -> None:
    """Deletes a file and its parts."""
    database.change("DELETE FROM file_part WHERE file = ?", file.id)
    database.change("DELETE FROM file WHERE id = ?", file.id)
    rows.count_usage(database, file.owner, 0, -file.size, -file.size - rows.ROW_BYTES)


def sweep(database: Database, now: float) -> bool:
    """Deletes files whose retention time is over, and abandoned uploads.

    Also deletes the stored creation times of files that were deleted long ago. Returns whether more
    files may be due.
    """
    needed = f"EXISTS (SELECT 1 FROM batch WHERE {NEEDED})"
    expired = select(database, f"forget <= ? AND NOT {needed} ORDER BY forget LIMIT ?", now, SWEPT)
    abandoned = select(
        database, "waits_since <= ? ORDER BY waits_since LIMIT ?", now - UPLOAD_LIFE, SWEPT
    )
    for file in {file.id: file for file in (*expired, *abandoned)}.values():
        drop(database, file)
    database.change("DELETE FROM deleted_file WHERE forget <= ?", now)
    return SWEPT in (len(expired), len(abandoned))
