"""Messages about files: bytes that the pool keeps for batches, with a key as name.

A file belongs to the owner and the tenant that sent it. It is sent in parts. A complete file never
changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeGuard

from msgspec import Meta, Struct

from mlxpool.common.checks import flag, integer, is_number, shown, text
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.kept.job_messages import MAX_KEEP_MS, job_key, tenant_of
from mlxpool.common.protocol.resume import MAX_TIME
from mlxpool.common.records import ShortText, read

PART_BYTES = 256 * 1024  # the most bytes of a file that one message sends or reads
MAX_FILE = 1024 * 1024 * 1024  # bytes
MAX_FILES = 1000  # the most files of one answer
LINES_PURPOSE = "batch_lines"  # purpose of a file that is kept as long as the results of its batch
READ, DELETE = "file", "file_delete"


def is_time(value: object) -> TypeGuard[int | float]:
    """Returns whether a value is a time in seconds since 1970."""
    return is_number(value) and 0 <= value <= MAX_TIME


class KeyName(Struct, frozen=True):
    """The key and the tenant that name a file or a batch."""

    key: str
    tenant: str = ""

    def body(self) -> dict[str, Any]:
        return {"key": self.key, "tenant": self.tenant} if self.tenant else {"key": self.key}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> KeyName:
        """Reads a body. Raises BadRequest naming the key and its value."""
        return cls(job_key(body.get("key")), tenant_of(body))

    def __str__(self) -> str:
        return repr(self.key)


class PutFile(Content, Struct, frozen=True):
    """Sends a part of a file; the part begins at byte `start`. The first part creates the file.

    A part may be sent again: then the broker compares it with the stored bytes. `last` is True for
    the last part of a file. `keep_ms` is the time that the file is kept after its first part; if it
    is None, an earlier part or the pool's settings decide.
    """

    kind: ClassVar[str] = "file_put"
    name: KeyName
    start: int
    data: bytes
    last: bool = False
    title: str = ""
    purpose: str = ""
    keep_ms: int | None = None

    def body(self) -> dict[str, Any]:
        body = {**self.name.body(), "start": self.start, "last": self.last}
        body |= {"name": self.title} if self.title else {}
        body |= {"purpose": self.purpose} if self.purpose else {}
        return body if self.keep_ms is None else {**body, "keep_ms": self.keep_ms}

    def blobs(self) -> tuple[bytes, ...]:
        return (self.data,)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> PutFile:
        """Reads a body. Raises BadRequest and TooLarge naming the key, its value and its bound."""
        if len(blobs) != 1:
            raise BadRequest(f"file_put has one blob, the bytes of the part; got {len(blobs)}")
        if len(blobs[0]) > PART_BYTES:
            raise TooLarge(f"the part has {len(blobs[0])} bytes, at most {PART_BYTES}")
        start = integer(body, "start", 0, MAX_FILE) or 0
        if start + len(blobs[0]) > MAX_FILE:
            raise TooLarge(
                f"the file has {start + len(blobs[0])} bytes or more, at most {MAX_FILE}"
            )
        title, purpose = text(body, "name"), text(body, "purpose")
        for key, value in (("name", title), ("purpose", purpose)):
            if not value.isprintable():
                raise BadRequest(f"{key} must be printable characters, got {shown(value)}")
        return cls(
            KeyName.parse(body),
            start,
            blobs[0],
            flag(body, "last", False),
            title,
            purpose,
            integer(body, "keep_ms", 1, MAX_KEEP_MS),
        )


class ReadFile(Content, Struct, frozen=True):
    """Asks for at most `limit` bytes of a file, beginning at byte `start`."""

    kind: ClassVar[str] = "file_read"
    name: KeyName
    start: Annotated[int, Meta(ge=0, le=MAX_FILE)] = 0
    limit: Annotated[int, Meta(ge=1, le=PART_BYTES)] = PART_BYTES

    def body(self) -> dict[str, Any]:
        return {**self.name.body(), "start": self.start, "limit": self.limit}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ReadFile:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        return read(body, cls, name=KeyName.parse(body))


class FilePlace(Struct, frozen=True):
    """A position in a list of files: the creation time of a file, and the key of this file.

    The files after this position are found even if the file itself was deleted.
    """

    created: float
    key: str

    def body(self) -> list[Any]:
        return [self.created, self.key]

    @classmethod
    def parse(cls, value: object) -> FilePlace:
        """Reads a list of time and key. Raises BadRequest if it is not such a list."""
        if not isinstance(value, list | tuple) or len(value) != 2 or not is_time(value[0]):
            raise BadRequest(
                f"behind must be a list of a file's time and key, as `next` is; got {shown(value)}"
            )
        return cls(float(value[0]), job_key(value[1]))


class ListFiles(Content, Struct, frozen=True):
    """Asks for the files of a tenant, the newest first, or the oldest first.

    `purpose` "" means all purposes. `behind` is the position after which the list begins.
    """

    kind: ClassVar[str] = "files"
    tenant: str = ""
    limit: Annotated[int, Meta(ge=1, le=MAX_FILES)] = MAX_FILES
    purpose: ShortText = ""
    behind: FilePlace | None = None
    oldest_first: bool = False

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"limit": self.limit}
        body |= {"purpose": self.purpose} if self.purpose else {}
        body |= {} if self.behind is None else {"behind": self.behind.body()}
        body |= {"oldest_first": True} if self.oldest_first else {}
        return {**body, "tenant": self.tenant} if self.tenant else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ListFiles:
        """Reads a body. Raises BadRequest naming the key, its value and its bound."""
        behind = body.get("behind")
        place = None if behind is None else FilePlace.parse(behind)
        return read(body, cls, tenant=tenant_of(body), behind=place)


class AboutFile(Content, Struct, frozen=True):
    """Asks for one file, or deletes a file: the message kinds READ and DELETE."""

    kind: str  # type: ignore[misc]  # one record for both kinds
    name: KeyName

    def body(self) -> dict[str, Any]:
        return self.name.body()


KINDS = frozenset({PutFile.kind, ReadFile.kind, ListFiles.kind, READ, DELETE})
Question = PutFile | ReadFile | ListFiles | AboutFile


def parse_question(kind: str, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Question:
    """Checks a message of one of KINDS. Raises BadRequest and TooLarge."""
    if kind == PutFile.kind:
        return PutFile.parse(body, blobs)
    if kind == ReadFile.kind:
        return ReadFile.parse(body)
    if kind == ListFiles.kind:
        return ListFiles.parse(body)
    return AboutFile(kind, KeyName.parse(body))


# ---- broker ------------------------------------------------------------------------------------


class FileRow(Content, Struct, frozen=True):
    """Answer to `file`, `file_put` and `file_delete`: the map of a file, see docs/protocol.md."""

    kind: ClassVar[str] = "file"
    row: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        return dict(self.row)


class FilePart(Content, Struct, frozen=True):
    """Answer to `file_read`: the map of the file with `start`, and the bytes as a blob."""

    kind: ClassVar[str] = "file_part"
    row: Mapping[str, Any]
    data: bytes

    def body(self) -> dict[str, Any]:
        return dict(self.row)

    def blobs(self) -> tuple[bytes, ...]:
        return (self.data,)


class FileList(Content, Struct, frozen=True):
    """Answer to `files`: the map of each file.

    `next` is the value of `behind` for the next request; None in the last answer.
    """

    kind: ClassVar[str] = "files"
    files: Sequence[Mapping[str, Any]]
    next: FilePlace | None = None

    def body(self) -> dict[str, Any]:
        following = None if self.next is None else self.next.body()
        return {"files": list(map(dict, self.files)), "next": following}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> FileList:
        following = body.get("next")
        return cls(list(body["files"]), None if following is None else FilePlace.parse(following))
