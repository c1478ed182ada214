"""The counting model's faults that the edge carries out: in accept, after_end and send."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Message
from mlxpool.worker.compute.messages import Key
from mlxpool.worker.process.link import Link
from mlxpool.worker.testing.faults import OF_FRAMES, Faults

LATE = 3  # frames that a late one comes after


@dataclass(slots=True)
class _Late:
    frames: int  # that still go before it
    epoch: int
    parts: list[bytes]


class FrameFaults:
    """Costs a comparison where nothing is armed."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._marked: set[Key] = set()  # requests that are to be hit
        self._frames = 0  # `deltas` frames with rows of such requests
        self._late: list[_Late] = []

    @property
    def on(self) -> bool:
        return self._faults.place in ("accept", "after_end", "send")

    def accept(self, message: Message, key: Key) -> None:
        """A `work` frame came. Raises Struck for `raise`."""
        if not self._faults.concerns(_prompt_of(message)):
            return
        self._marked.add(key)
        self._faults.at("accept")

    def send(self, link: Link, rows: list[Delta], parts: list[bytes], stale: list[bytes]) -> None:
        """Put a `deltas` frame on the link, and what goes wrong with it.

        `stale` is the same frame with the epoch before.
        """
        hit = self._hits(rows)
        if hit and self._faults.name not in OF_FRAMES:
            link.flush()
            self._faults.strike()
        link.put(parts)
        self._send_late(link)
        if hit and self._faults.name in OF_FRAMES:
            self._faults.strike()
            self._spoil(link, parts, stale)

    def _hits(self, rows: list[Delta]) -> bool:
        concerned = any((row.id, row.attempt) in self._marked for row in rows)
        if self._faults.place != "send" or not concerned:
            return False
        number, self._frames = self._frames, self._frames + 1
        return self._faults.now(range(number, number + 1))

    def _spoil(self, link: Link, parts: list[bytes], stale: list[bytes]) -> None:
        if self._faults.name == "garbage":
            link.put([hashlib.sha256(part).digest() for part in parts])
        elif self._faults.name == "duplicate":
            link.put(parts)
        elif self._faults.name == "stale":
            link.put(stale)
        else:
            self._late.append(_Late(LATE, link.epoch, parts))

    def _send_late(self, link: Link) -> None:
        for late in self._late:
            late.frames -= 1
            if not late.frames and late.epoch == link.epoch:
                link.put(late.parts)
        self._late = [late for late in self._late if late.frames > 0]

    def after(self, link: Link, rows: list[Delta]) -> None:
        """Rows have been put; those that ended a request may be the end of us too."""
        ended = {(row.id, row.attempt) for row in rows if row.end is not None}
        if self._faults.place == "after_end" and ended & self._marked:
            link.flush()
            self._faults.strike()
        self._marked -= ended


def _prompt_of(message: Message) -> bytes:
    """The prompt's text as it came; of messages, their contents."""
    body = message.body
    if body.get("tokens") is True:
        return b"".join(message.blobs[:1])[::4]
    if body.get("prompt") is True:
        return b"".join(message.blobs[:1])
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"]).encode("utf-8", "replace")
    said = [m.get("content") for m in body.get("messages") or () if isinstance(m, Mapping)]
    return "\n".join(map(str, said)).encode("utf-8", "replace")
