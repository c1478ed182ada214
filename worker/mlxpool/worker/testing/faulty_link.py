"""Injects the counting model's faults into received work and sent deltas."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from mlxpool.common.protocol import deltas
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header, encode
from mlxpool.common.protocol.prompts import ChatPrompt, Prompt, TextPrompt
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.protocol.token_ids import ID_WIDTH
from mlxpool.common.trace import History
from mlxpool.common.transport.keys import Credentials
from mlxpool.worker.compute.messages import RunKey
from mlxpool.worker.process.intake import Intake, Request, Task
from mlxpool.worker.process.link import Link
from mlxpool.worker.testing.faults import FRAME_FAULTS, Faults

FRAMES_BEFORE_LATE = 3  # `deltas` frames that overtake a late frame


class _LateFrame(Struct):
    frames_before: int  # frames to send before the late frame
    epoch: int
    parts: list[bytes]


class FaultyLink(Link):
    """Injects the faults of the sites `send` and `after_end`, for the deltas of marked runs."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        history: History,
        credentials: Credentials | None,
        faults: Faults,
    ) -> None:
        super().__init__(endpoint, token, history, credentials)
        self.faults = faults
        self._marked: set[RunKey] = set()
        self._frames = 0  # `deltas` frames with deltas of marked runs
        self._late: list[_LateFrame] = []

    def mark(self, key: RunKey) -> None:
        """Records that this run gets faults."""
        self._marked.add(key)

    def put_deltas(self, deltas: Sequence[Delta], parts: list[bytes]) -> None:
        hit = self._is_hit(deltas)
        if hit and self.faults.name not in FRAME_FAULTS:
            self.flush()
            self.faults.strike()
        super().put_deltas(deltas, parts)
        self._put_late()
        if hit and self.faults.name in FRAME_FAULTS:
            self.faults.strike()
            self._spoil(parts)
        ended = {(delta.id, delta.attempt) for delta in deltas if delta.end is not None}
        if self.faults.site == "after_end" and ended & self._marked:
            self.flush()
            self.faults.strike()
        self._marked -= ended

    def _is_hit(self, deltas: Sequence[Delta]) -> bool:
        concerned = any((delta.id, delta.attempt) in self._marked for delta in deltas)
        if self.faults.site != "send" or not concerned:
            return False
        number, self._frames = self._frames, self._frames + 1
        return self.faults.is_due(range(number, number + 1))

    def _spoil(self, parts: list[bytes]) -> None:
        if self.faults.name == "garbage":
            self.put([hashlib.sha256(part).digest() for part in parts])
        elif self.faults.name == "duplicate":
            self.put(parts)
        elif self.faults.name == "stale":
            header = Header(deltas.Deltas.kind, None, max(0, self.epoch - 1))
            self.put([*encode(header), *parts[1:]])
        else:
            self._late.append(_LateFrame(FRAMES_BEFORE_LATE, self.epoch, parts))

    def _put_late(self) -> None:
        for late in self._late:
            late.frames_before -= 1
            if not late.frames_before and late.epoch == self.epoch:
                self.put(late.parts)
        self._late = [late for late in self._late if late.frames_before > 0]


class FaultyIntake(Intake):
    """Marks the runs that get faults, and injects the faults of the site `accept`."""

    def prepare(self, task: Task, request: Request) -> None:
        """Begins a preparation. Before this, marks a run that gets faults.

        Also injects the fault of the site `accept`. Raises Struck for the fault `raise`.
        """
        link = self._link
        assert isinstance(link, FaultyLink)
        if isinstance(request, Work) and link.faults.concerns(_text_of(request.prompt)):
            link.mark(task.name)
            link.faults.strike_at("accept")
        super().prepare(task, request)


def _text_of(prompt: Prompt) -> bytes:
    """Returns the prompt's text; for messages, their contents."""
    if isinstance(prompt, TextPrompt):
        return prompt.text.encode("utf-8", "replace")
    if isinstance(prompt, ChatPrompt):
        contents = [m.get("content") for m in prompt.messages or () if isinstance(m, Mapping)]
        return "\n".join(map(str, contents)).encode("utf-8", "replace")
    return prompt.blob[::ID_WIDTH] if prompt.key == "tokens" else prompt.blob
