"""The operations on files, which are stored in parts."""

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

PART = 256 * 1024  # bytes of a stored part at most
# Seconds after its last part until a file is deleted that is not complete, or that has the lines of
# a batch which was never made: its sender is gone.
UPLOAD_LIFE = 3600.0
SWEPT = 4  # files that one sweep deletes of each kind: each may have 1 GiB
DELETED_LIFE = 3600.0  # seconds for which it is known where in a list a deleted file was
# A batch whose lines are still to become jobs needs its file. A gateway reads the lines that it has
# written for a batch as long as that has results.
NEEDED = (
    "batch.file = file.id AND (batch.state = 'open'"
    f" OR file.purpose = '{LINES_PURPOSE}' AND batch.state <> 'gone'"
    f" AND batch.deleted <> {int(Outcomes.DONE | Outcomes.OTHERS)})"
)
COLUMNS = FileView.__struct_fields__  # the record has those of the table


def select(database: Database, condition: str, *values: Any) -> list[FileView]:
    """The files for which a condition holds, and what follows on it, such as an order."""
    found = database.execute(f"SELECT {', '.join(COLUMNS)} FROM file WHERE {condition}", *values)
    named = (dict(zip(COLUMNS, row, strict=True)) for row in found)
    return [FileView(**{**columns, "complete": bool(columns["complete"])}) for columns in named]


def find(database: Database, id: bytes, owner: str | None, tenant: str | None) -> FileView | None:
    """The file with this id; None if there is none, or another owner's or tenant's."""
    found = select(database, "id = ?", id)
    if not found or owner not in (None, found[0].owner) or tenant not in (None, found[0].tenant):
        return None
    return found[0]


def create_file(database: Database, asked: CreateFile, now: float, room: int) -> Result:
    """Begin a file with its first part; of one that is there already the part is compared."""
    check_names(Scope(asked.owner, asked.tenant, asked.key), asked.name, asked.purpose)
    part = AppendFile(
        asked.id, asked.owner, asked.tenant, 0, asked.data, asked.last, asked.max_bytes
    )
    if find(database, asked.id, asked.owner, asked.tenant) is None:
        refused = _no_room(database, part, len(part.data) + rows.ROW_BYTES, room)
        if refused is not None:
            return refused
        _insert(database, asked, now)
    return append_file(database, part, now, room)


def _insert(database: Database, asked: CreateFile, now: float) -> None:
    added = database.change(
        "INSERT INTO file (id, owner, tenant, key, name, purpose, size, complete, created,"
        " forget, waits_since) VALUES (?, ?, ?, ?, ?, ?, 0, 0, ?, ?, ?)"
        " ON CONFLICT (id) DO NOTHING",
        asked.id,
        asked.owner,
        asked.tenant,
        asked.key,
        asked.name,
        asked.purpose,
        now,
        None if asked.keep is None else now + asked.keep,
        now,
    )
    if not added:
        raise ValueError(f"the id {asked.id.hex()} is a file of another owner")
    rows.count_usage(database, asked.owner, 0, 0, rows.ROW_BYTES)


def _no_room(database: Database, part: AppendFile, size: int, room: int) -> Refused | None:
    """Why a part that adds `size` bytes is refused; None if it is not."""
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
    data = asked.data[known:]
    refused = _no_room(database, replace(asked, data=data), len(data), room)
    if refused is not None:
        return refused
    for start in range(0, len(data), PART):
        database.change(
            "INSERT INTO file_part (file, start, data) VALUES (?, ?, ?)",
            asked.id,
            file.size + start,
            data[start : start + PART],
        )
    database.change(
        "UPDATE file SET size = size + ?, complete = ?, waits_since = ?,"
        " forget = COALESCE(created + ?, forget) WHERE id = ?",
        len(data),
        int(asked.last),
        None if asked.last and file.purpose != LINES_PURPOSE else now,
        asked.keep,
        asked.id,
    )
    rows.count_usage(database, file.owner, 0, len(data), len(data))
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
        return _unknown(database, asked)
    return FilePart(file, asked.start, read_from(database, file.id, asked.start, asked.max_bytes))


def _unknown(database: Database, asked: ReadFile) -> UnknownName:
    """There is no such file; when it was created, if it was deleted lately."""
    row = database.one(
        "SELECT created FROM deleted_file WHERE id = ? AND owner = ? AND tenant = ?",
        asked.id,
        asked.owner,
        asked.tenant,
    )
    return UnknownName(None if row is None else row[0])


def list_files(database: Database, asked: ListFiles, now: float) -> FileList:
    where, values = ["owner = ?", "tenant = ?"], list[Any]([asked.owner, asked.tenant])
    if asked.purpose:
        where.append("purpose = ?")
        values.append(asked.purpose)
    sign, order = (">", "ASC") if asked.oldest_first else ("<", "DESC")
    if asked.behind is not None:
        where.append(f"(created, id) {sign} (?, ?)")
        values += asked.behind
    condition = f"{' AND '.join(where)} ORDER BY created {order}, id {order} LIMIT ?"
    found = select(database, condition, *values, asked.count + 1)
    return FileList(tuple(found[: asked.count]), len(found) > asked.count)


def delete_file(database: Database, asked: DeleteFile, now: float) -> Result:
    file = find(database, asked.id, asked.owner, asked.tenant)
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
    """Why a file cannot be deleted now; None: no batch needs it."""
    found = database.one(
        f"SELECT batch.state FROM batch, file WHERE file.id = ? AND {NEEDED} LIMIT 1", file.id
    )
    if found is None:
        return None
    if file.purpose == LINES_PURPOSE:
        return (
            "the results of a batch are read together with this file; release the batch, which"
            " deletes the file (mlxpool release --batch)"
        )
    return "an open batch reads this file; cancel the batch first"


def let_go(database: Database, batch: bytes, now: float) -> None:
    """Have the lines deleted that a gateway wrote for a batch whose results are gone."""
    database.change(
        "UPDATE file SET forget = ? WHERE purpose = ?"
        " AND id = (SELECT file FROM batch WHERE batch.id = ?)",
        now,
        LINES_PURPOSE,
        batch,
    )


def drop(database: Database, file: FileView) -> None:
    """Delete a file and its parts."""
    database.change("DELETE FROM file_part WHERE file = ?", file.id)
    database.change("DELETE FROM file WHERE id = ?", file.id)
    rows.count_usage(database, file.owner, 0, -file.size, -file.size - rows.ROW_BYTES)


def sweep(database: Database, now: float) -> bool:
    """Delete files past their time, and those that have waited for UPLOAD_LIFE.

    Also forget where files were that were deleted long ago. Returns whether more may be left.
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
