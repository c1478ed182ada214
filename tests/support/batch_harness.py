"""Simulations of batches for tests: a core, a manager, and a real store in the test's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from mlxpool.broker.jobs import events as ev
from mlxpool.common.protocol.frames import unpack
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept import file_messages as files
from mlxpool.common.protocol.kept.batch_messages import (
    AboutBatch,
    ReadOutcomes,
    SubmitBatch,
    WaitForProgress,
)
from mlxpool.common.protocol.kept.file_messages import KeyName, PutFile
from support.core_harness import OWNER, FakeWorker
from support.job_harness import JobStory


def jsonl(lines: Iterable[Any]) -> bytes:
    """Returns a file of JSON lines; a line given as bytes is not changed."""
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"l{number}", "prompt": f"prompt {number}"} for number in range(count)]


class BatchStory(JobStory):
    """A simulation with batches. `submit_batch` sends a file and its batch under one key."""

    def put(self, key: str, data: bytes, *, owner: str = OWNER, tenant: str = "") -> None:
        """Sends a whole file."""
        starts = range(0, max(1, len(data)), files.PART_BYTES)
        for start in starts:
            part = data[start : start + files.PART_BYTES]
            last = start + len(part) == len(data)
            self.ask(PutFile(KeyName(key, tenant), start, part, last), owner=owner)
        self.settle()

    def submit_batch(
        self, key: str, lines: Iterable[Any], *, owner: str = OWNER, **fields: Any
    ) -> dict[str, Any]:
        data = jsonl(lines)
        self.put(key, data, owner=owner)
        fields = {"defaults": {"model": "m"}, **fields}
        digest = hashlib.sha256(data).digest()
        message = SubmitBatch(KeyName(key), key, digest, data.count(b"\n"), **fields)
        ident = self.ask(message, owner=owner)
        self.settle()
        return self.answer(ident)

    def about_batch(self, kind: str, key: str, *, owner: str = OWNER) -> dict[str, Any]:
        only = messages.DONE if kind == messages.RELEASE_RESULTS else ""
        ident = self.ask(AboutBatch(kind, KeyName(key), only), owner=owner)
        self.settle()
        return self.answer(ident)

    def batch(self, key: str) -> dict[str, Any]:
        return self.about_batch(messages.READ, key)

    def wait_for(self, key: str, seen: str = "", *, link: int = 1) -> bytes:
        """Asks for the progress of a batch; returns the id of the request.

        `seen` is the `mark` of the newest answer that the client has; the broker answers when the
        batch changes. With "" the broker answers immediately.
        """
        return self.ask(WaitForProgress(KeyName(key), seen), link)

    def answered(self, ident: bytes) -> bool:
        return any(tell.header.id == ident for tell in self.told)

    def outcomes(self, key: str, limit: int = 3) -> list[dict[str, Any]]:
        """Returns the outcomes of all pages."""
        outcomes, after = [], -1
        while True:
            ident = self.ask(ReadOutcomes(KeyName(key), after, limit))
            self.settle()
            answer = next(tell.message for tell in self.told if tell.header.id == ident)
            outcomes += unpack(answer.blobs()[0])
            after = (answer.body() or {})["next"]
            if after < 0:
                return outcomes

    def pass_time(self, seconds: float) -> None:
        """Advances the clock, and does all work that becomes due."""
        end = self.now + seconds
        while self.now < end:
            super().pass_time(min(0.1, end - self.now))
            while self.manager.next_wake() <= self.now:
                self.tell_manager(ev.Wake())
                self.settle()

    def work_off(self, worker: FakeWorker, seconds: float = 60.0) -> None:
        """Makes a worker end all its runs, each with two tokens, until no new run comes.

        Stops after `seconds` of simulated time at the latest.
        """
        end = self.now + seconds
        quiet = 0
        while quiet < 3 and self.now < end:
            quiet = 0 if worker.runs else quiet + 1
            for id in list(worker.runs):
                worker.tokens(id, 1)
                worker.end(id, count=1)
            worker.credit()
            self.settle()
            self.pass_time(0.2)
