"""All requests about the stored data of a pool: jobs, files and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.kept import batch_messages, file_messages, job_messages

KINDS = job_messages.KINDS | file_messages.KINDS | batch_messages.KINDS
SUBMISSIONS = frozenset(  # kinds of messages that add stored data
    {job_messages.Submit.kind, batch_messages.SubmitBatch.kind, file_messages.PutFile.kind}
)
Question = job_messages.Question | file_messages.Question | batch_messages.Question


def asks(message: Message) -> bool:
    """Returns whether a message is a request about stored data, such as a `cancel` of a job."""
    return message.kind in KINDS or job_messages.names_a_job(message)


def parse_question(kind: str, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Question:
    """Checks a request about stored data. Raises BadRequest and TooLarge."""
    if kind in file_messages.KINDS:
        return file_messages.parse_question(kind, body, blobs)
    if kind in batch_messages.KINDS:
        return batch_messages.parse_question(kind, body)
    return job_messages.parse_question(kind, body, blobs)
