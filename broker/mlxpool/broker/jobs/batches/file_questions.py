"""Answers questions of clients about files."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.jobs import answers
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Outbox
from mlxpool.broker.jobs.batches.batch_rows import file_id, file_row
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.store import batch_operations as store
from mlxpool.broker.store.batch_operations import FileDiffers, FileList, FilePart, FileView
from mlxpool.broker.store.records import Result, UnknownName
from mlxpool.common.errors import DuplicateId, PoolError, UnknownJob
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.kept import file_messages as messages
from mlxpool.common.protocol.kept.file_messages import (
    AboutFile,
    FilePlace,
    FileRow,
    KeyName,
    ListFiles,
    PutFile,
    ReadFile,
)


class FileQuestions:
    """Answers the questions of `file_messages`."""

    def __init__(self, outbox: Outbox, policy: Callable[[], JobPolicy]) -> None:
        """`policy` returns the present settings."""
        self._outbox = outbox
        self._policy = policy

    def on_asked(self, event: ev.QuestionAsked, message: messages.Question) -> None:
        """Asks the store; its result is the answer to the client."""
        if isinstance(message, PutFile):
            self._put(event, message)
        elif isinstance(message, ReadFile):
            self._read(event, message)
        elif isinstance(message, ListFiles):
            self._list(event, message)
        else:
            self._about(event, message)

    def _send(self, event: ev.QuestionAsked, message: Content) -> None:
        self._outbox.send(event.link, message, event.id, event.attempt)

    def _answer(self, event: ev.QuestionAsked, name: KeyName, result: Result) -> None:
        if isinstance(result, FileView):
            self._send(event, FileRow(file_row(result)))
        else:
            error = _error(name, result)
            self._outbox.refuse(event, error)

    def _put(self, event: ev.QuestionAsked, message: PutFile) -> None:
        name = message.name
        id = file_id(event.owner, name.tenant, name.key)
        policy = self._policy()
        operation: store.CreateFile | store.AppendFile
        if message.start == 0:
            operation = store.CreateFile(
                id,
                event.owner,
                name.tenant,
                name.key,
                message.title,
                message.purpose,
                policy.kept(message.keep_ms),
                message.data,
                message.last,
                policy.quota_file_bytes,
            )
        else:
            operation = store.AppendFile(
                id,
                event.owner,
                name.tenant,
                message.start,
                message.data,
                message.last,
                policy.quota_file_bytes,
                None if message.keep_ms is None else policy.kept(message.keep_ms),
            )
        self._outbox.store(operation, lambda result, now: self._answer(event, name, result))

    def _read(self, event: ev.QuestionAsked, message: ReadFile) -> None:
        name = message.name
        id = file_id(event.owner, name.tenant, name.key)

        def then(result: Result, now: float) -> None:
            if isinstance(result, FilePart):
                row = {**file_row(result.file), "start": result.start}
                self._send(event, messages.FilePart(row, result.data))
            else:
                self._answer(event, name, result)

        self._outbox.store(
            store.ReadFile(id, event.owner, name.tenant, message.start, message.limit), then
        )

    def _list(self, event: ev.QuestionAsked, message: ListFiles) -> None:
        def then(result: Result, now: float) -> None:
            if isinstance(result, FileList):
                shown = answers.fitting([file_row(file) for file in result.files])
                more = result.more or len(shown) < len(result.files)
                last = result.files[len(shown) - 1] if shown and more else None
                following = None if last is None else FilePlace(last.created, last.key)
                self._send(event, messages.FileList(shown, following))
            else:
                self._answer(event, KeyName("", message.tenant), result)

        behind = message.behind
        operation = store.ListFiles(
            event.owner,
            message.tenant,
            message.limit,
            message.purpose,
            None
            if behind is None
            else (behind.created, file_id(event.owner, message.tenant, behind.key)),
            message.oldest_first,
        )
        self._outbox.store(operation, then)

    def _about(self, event: ev.QuestionAsked, message: AboutFile) -> None:
        name = message.name
        id = file_id(event.owner, name.tenant, name.key)
        if message.kind == messages.DELETE:
            operation = store.DeleteFile(id, event.owner, name.tenant)
            self._outbox.store(operation, lambda result, now: self._answer(event, name, result))
            return

        def then(result: Result, now: float) -> None:
            answer = result.file if isinstance(result, FilePart) else result
            self._answer(event, name, answer)

        self._outbox.store(store.ReadFile(id, event.owner, name.tenant, 0, max_bytes=0), then)


def _error(name: KeyName, result: Result) -> PoolError:
    if isinstance(result, FileDiffers):
        return DuplicateId(
            f"the file {name} has {result.file.size} bytes, and differs from byte {result.start}"
            " on from the bytes sent: take another key, or delete that file first"
        )
    if isinstance(result, UnknownName):
        details = None if result.created is None else {"created": result.created}
        return UnknownJob(f"there is no file {name} of this owner", details=details)
    return answers.unexpected(result)
