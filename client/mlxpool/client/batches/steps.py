"""The client's work with batches, as generators of steps, such as a call or a pause.

The blocking client and the asyncio client perform the same steps. They send the answer to a step
into the generator, or throw the error of the step into it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from mlxpool.client.batches.outcome import Page
from mlxpool.client.batches.source import Lines, Part, Source
from mlxpool.client.jobs import IDLE_NAME, OF_BATCHES, BatchOptions, OnSent, milliseconds
from mlxpool.client.request import Question, divide_options
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    PoolError,
    QueueFull,
    StoreUnavailable,
    UnknownJob,
)
from mlxpool.common.options import MAX_DEADLINE_MS
from mlxpool.common.protocol.frames import ID_BYTES, Content, Message
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept import file_messages as files
from mlxpool.common.protocol.kept.batch_lines import DEFAULTS
from mlxpool.common.protocol.kept.batch_messages import (
    AboutBatch,
    BatchList,
    ListBatches,
    ReadOutcomes,
    SubmitBatch,
    WaitForProgress,
)
from mlxpool.common.protocol.kept.file_messages import AboutFile, KeyName, PutFile
from mlxpool.common.protocol.kept.job_messages import IDLE, Notify, job_key

KEY_BYTES = 8  # bytes of a random key
PATIENCE = 120  # consecutive retries of a call to a busy store, about a second apart
PAUSE = 1.0  # seconds before a retry, if the pool's error has no retry_after_ms

Answer = TypeVar("Answer")


def submission(lines: Lines, model: str | None, options: BatchOptions) -> Steps[dict[str, Any]]:
    """Returns the steps that submit a batch, see `submit`. Raises BadRequest."""
    source, settings = source_and_settings(lines, model, options)
    key = options.get("key")
    return submit(source, drawn_key() if key is None else key, settings, options.get("on_sent"))


def source_and_settings(
    lines: Lines, model: str | None, options: BatchOptions
) -> tuple[Source, dict[str, Any]]:
    """Returns the lines with their defaults, and the settings of the batch. Raises BadRequest."""
    of_lines = {name: value for name, value in options.items() if name not in OF_BATCHES}
    priority = of_lines.pop("priority", None)
    sampling, others = divide_options(of_lines)
    unknown = [name for name in others if name not in DEFAULTS]
    if unknown:
        raise BadRequest(f"{unknown[0]} is of streams, not of batches")
    defaults = {**others, "options": sampling}
    if model is not None:
        defaults["model"] = model
    settings: dict[str, Any] = {
        "priority": IDLE if priority == IDLE_NAME else priority or 0,
        "metadata": dict(options.get("metadata") or {}),
    }
    if (keep := options.get("keep")) is not None:
        settings["keep_ms"] = milliseconds("keep", keep)
    if (deadline := options.get("deadline")) is not None:
        settings["deadline_ms"] = max(1, milliseconds("deadline", deadline, MAX_DEADLINE_MS))
    if (notify := options.get("notify")) is not None:
        settings["notify"] = Notify.parse({"url": notify})
    check = options.get("check")
    return Source(lines, defaults, check is None or bool(check)), settings


class Pause(Struct, frozen=True):
    """A step that waits for `seconds`. Its answer is None."""

    seconds: float


class Work(Struct, frozen=True):
    """A step that takes time, such as reading a file. Its answer is the result of `call`."""

    call: Callable[[], Any]


Steps = Generator[Question[Any] | Pause | Work, Any, Answer]


def _ask(content: Content, read: Callable[[Message], Any]) -> Question[Any]:
    return Question(os.urandom(ID_BYTES), content, read)


def _row(answer: Message) -> dict[str, Any]:
    return dict(answer.body)


def _patiently(content: Content, read: Callable[[Message], Any]) -> Steps[Any]:
    """Makes a call, and retries it while the store is busy or the store's disk fails."""
    for attempt in range(PATIENCE):
        try:
            return (yield _ask(content, read))
        except (QueueFull, StoreUnavailable) as error:
            if attempt == PATIENCE - 1:
                raise
            yield Pause((error.retry_after_ms or 1000 * PAUSE) / 1000)
    raise AssertionError("not reached")


# ---- submit --------------------------------------------------------------------------------------


def drawn_key() -> str:
    return os.urandom(KEY_BYTES).hex()


def submit(
    source: Source, key: str, settings: Mapping[str, Any], on_sent: OnSent | None
) -> Steps[dict[str, Any]]:
    """Sends a file, and submits its lines as a batch; the file and the batch have the same key.

    A program may repeat these steps, even if another program has begun the steps and not finished
    them. `settings` are fields of SubmitBatch. Raises PoolError.
    """
    name = KeyName(job_key(key))
    try:
        yield from _send(source, name, on_sent)
    except DuplicateId:
        if not (source.repeatable and (yield from _drop_incomplete(name))):
            raise
        source = source.again()
        yield from _send(source, name, on_sent)
    digest = source.digest.digest()
    message = SubmitBatch(name, key, digest, source.count, source.defaults, **settings)
    row: dict[str, Any] = yield from _patiently(message, _row)
    return row


def _send(source: Source, name: KeyName, on_sent: OnSent | None) -> Steps[None]:
    """Sends the file part by part: a part is on the disk before the next part is sent."""
    parts = source.parts()
    while True:
        try:
            part = yield Work(partial(next, parts, None))
        except PoolError:  # an invalid line ends the submission
            yield from _drop_incomplete(name)
            raise
        if part is None:
            return
        yield from _put(part, name)
        if on_sent is not None:
            on_sent(part.start + len(part.data))


def _put(part: Part, name: KeyName) -> Steps[None]:
    message = PutFile(name, part.start, part.data, part.last)
    row = yield from _patiently(message, _row)
    if row["size"] < part.start + len(part.data):
        raise DuplicateId(
            f"the file {name} was changed by another program: it has {row['size']} bytes"
        )


def _drop_incomplete(name: KeyName) -> Steps[bool]:
    """Deletes an incomplete file of an earlier program. Returns whether there was such a file."""
    try:
        row = yield _ask(AboutFile(files.READ, name), _row)
        if not row["complete"]:
            yield _ask(AboutFile(files.DELETE, name), _row)
            return True
    except UnknownJob:
        pass
    return False


# ---- one batch -----------------------------------------------------------------------------------


def about(kind: str, key: str) -> Question[dict[str, Any]]:
    """Returns a call about a batch; `kind` is a message kind in batch_messages.CALLS.

    Raises BadRequest if the key is malformed.
    """
    return _ask(AboutBatch(kind, KeyName(job_key(key))), _row)


def progress(key: str, seen: str) -> Steps[dict[str, Any]]:
    """Waits without a time limit until a batch changes, or has ended. Returns its map.

    `seen` is the `mark` of the newest map that the caller has, or "".
    """
    while True:
        row = yield from _patiently(WaitForProgress(KeyName(key), seen), _row)
        if row["mark"] != seen or is_over(row):
            return dict(row)


def is_over(row: Mapping[str, Any]) -> bool:
    """Returns whether all jobs of a batch have ended."""
    return row["state"] not in ("running", "cancelling")


def page(key: str, after: int) -> Steps[Page]:
    """Reads the outcomes of lines after the line with the number `after`."""
    answer: Page = yield from _patiently(ReadOutcomes(KeyName(key), after), Page.of)
    return answer


class BatchPages:
    """A list of batches, collected from several answers."""

    def __init__(self, limit: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.complete = False
        self._limit, self._before = limit, ""

    def question(self) -> Question[BatchList]:
        """Returns the call that asks for the next batches."""
        left = self._limit - len(self.rows) if self._limit else messages.MAX_BATCHES
        content = ListBatches(before=self._before, limit=min(left, messages.MAX_BATCHES))
        return _ask(content, lambda answer: BatchList.parse(answer.body))

    def add(self, answer: BatchList) -> None:
        """Adds the batches of an answer."""
        self.rows += map(dict, answer.batches)
        self._before = answer.next
        self.complete = not answer.next or 0 < self._limit <= len(self.rows)
