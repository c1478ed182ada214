"""Lists and deletes the files that the pool keeps for batches."""

from __future__ import annotations

import os
from typing import Any

from mlxpool.client.request import Question
from mlxpool.common.protocol.frames import ID_BYTES
from mlxpool.common.protocol.kept import file_messages as messages
from mlxpool.common.protocol.kept.file_messages import (
    AboutFile,
    FileList,
    FilePlace,
    KeyName,
    ListFiles,
)
from mlxpool.common.protocol.kept.job_messages import job_key


def delete(key: str) -> Question[dict[str, Any]]:
    """Returns the call that deletes a file; its answer is the file's map. Raises BadRequest."""
    about = AboutFile(messages.DELETE, KeyName(job_key(key)))
    return Question(os.urandom(ID_BYTES), about, lambda answer: dict(answer.body))


class FilePages:
    """A list of files, collected from several answers.

    If a file is deleted or added between two answers, the list still has every other file once.
    """

    def __init__(
        self,
        limit: int,
        purpose: str = "",
        behind: FilePlace | None = None,
        *,
        oldest_first: bool = False,
    ) -> None:
        """`limit` 0 means all files. `behind` is the position after which the list begins."""
        self.rows: list[dict[str, Any]] = []
        self.complete = False
        self._limit, self._purpose, self._behind = limit, purpose, behind
        self._oldest_first = oldest_first

    def content(self) -> ListFiles:
        """Returns the message that asks for the next files."""
        left = self._limit - len(self.rows) if self._limit else messages.MAX_FILES
        return ListFiles(
            limit=min(left, messages.MAX_FILES),
            purpose=self._purpose,
            behind=self._behind,
            oldest_first=self._oldest_first,
        )

    def question(self) -> Question[FileList]:
        """Returns the call that asks for the next files."""
        return Question(
            os.urandom(ID_BYTES), self.content(), lambda answer: FileList.parse(answer.body)
        )

    def add(self, answer: FileList) -> None:
        """Adds the files of an answer."""
        self.rows += map(dict, answer.files)
        self._behind = answer.next
        self.complete = answer.next is None or 0 < self._limit <= len(self.rows)
