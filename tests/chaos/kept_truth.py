"""The states of jobs that clients have seen, and checks that these states agree.

Pure logic, except for a lock. The answer of a job follows from its key: the prompt is the key, the
seed is SEED, and the number of ids is `count_of(key)`. So any part of the output can be checked.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from support.counting_checker import expected_ids, text_of

SEED = 7
ENDED = ("done", "cancelled", "dead", "expired")
WHOLE = ("length", "stop")  # reasons of an answer that has all its ids
MAX_COUNT = 160  # most jobs have at most this number of ids


class StormOver(Exception):
    """Raised in every thread after an error was found, so that the storm ends."""


@cache
def count_of(key: str) -> int:
    """Returns the number of ids of the job with this key."""
    drawn = zlib.crc32(key.encode())
    return 1 + drawn % (MAX_COUNT if drawn % 8 else 5 * MAX_COUNT)  # some jobs are long


@cache
def ids_of(prompt: str, count: int) -> tuple[int, ...]:
    """Returns the ids of an undisturbed run."""
    return tuple(expected_ids(prompt, SEED, count))


def prompt_of(key: str, kind: str) -> str:
    """Returns the text that the model reads: the key, or a chat of one message for a response."""
    return f"user: {key}\n" if kind == "response" else key


@dataclass(eq=False)
class Known:
    """An accepted job, and its states that the pool has reported."""

    owner: str
    key: str
    id: str  # id in the interface that made it: hexadecimal digits, or `resp_…`
    kind: str = "job"  # or "response"
    fates: frozenset[str] = frozenset({"done"})  # the ends that the job may have
    state: str = ""  # the reported end
    cancelled: bool = False  # a cancel was reported
    released: bool = False  # the deletion of its result was reported
    retried: int = 0  # number of retries
    had: int = 0  # the job has at least this number of ids

    @property
    def ids(self) -> tuple[int, ...]:
        return ids_of(prompt_of(self.key, self.kind), count_of(self.key))

    @property
    def text(self) -> str:
        return text_of(self.ids)


@dataclass(eq=False)
class Truth:
    """The state that all threads of a storm share.

    `wrong` has a sentence for each contradiction.
    """

    jobs: dict[tuple[str, str], Known] = field(default_factory=dict)  # by owner and key
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    events: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def error(self, text: str) -> None:
        with self._lock:
            self.wrong.append(text)

    def check(self) -> None:
        """Raises StormOver if something is wrong: then all threads end."""
        if self.wrong:
            raise StormOver

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def accepted(self, known: Known) -> Known:
        """Records that a job was accepted; returns the first job with its owner and key.

        An error is recorded if the first job has another id.
        """
        with self._lock:
            first = self.jobs.setdefault((known.owner, known.key), known)
            self.counts[f"accepted {known.kind}"] += first is known
        if first.id != known.id:
            self.error(f"{known.key}: accepted as {first.id}, and again as {known.id}")
        return first

    def of(self, owner: str) -> list[Known]:
        with self._lock:
            return [known for known in self.jobs.values() if known.owner == owner]

    # ---- reported states
    # ---------------------------------------------------------------------------

    def row(self, known: Known, row: dict[str, Any]) -> None:
        """Compares a row of a job, as the pool returned it, with the earlier states of the job.

        Only one thread at a time may call this for a job that has not ended.
        """
        state, ids = str(row["state"]), int(row["ids"])
        self.count("rows")
        if row["key"] != known.key or row.get("gen"):
            self.error(f"{known.key}: looked up, and found {row}")
        if ids > len(known.ids):
            self.error(f"{known.key}: has {ids} ids of {len(known.ids)}")
        self.told(known, state)

    def told(self, known: Known, state: str) -> None:
        """Checks a state of a job that was reported to its owner."""
        if known.released and state != "gone":
            self.error(f"{known.key}: was released, is {state}")
        if known.cancelled and state not in ("cancelled", "gone"):
            self.error(f"{known.key}: was cancelled, is {state}")
        if state in ENDED and state not in known.fates:
            self.error(f"{known.key}: is {state}, may be {sorted(known.fates)}")
        if state == "cancelled":
            known.cancelled = True
        if state == "gone":
            known.released = True
        elif state in ENDED:
            known.state = state

    # ---- read ids
    # ----------------------------------------------------------------------------------

    def ids(self, known: Known, pos: int, ids: Sequence[int], had: int) -> int:
        """Checks ids from `pos` on, for a reader with `had` ids; returns its new number of ids."""
        self.count("ids", len(ids))
        if pos != had:
            self.error(f"{known.key}: ids from {pos} on came to a reader that has {had}")
        if tuple(ids) != known.ids[pos : pos + len(ids)]:
            self.error(f"{known.key}: wrong ids from {pos} on: {list(ids)[:8]}")
        return pos + len(ids)

    def read(self, known: Known, had: int, reason: str) -> None:
        """Checks the end of an output that was read: its reason, and the total of `had` ids."""
        self.count(f"read to {reason}")
        if reason in WHOLE and had != len(known.ids):
            self.error(f"{known.key}: {reason} after {had} of {len(known.ids)} ids")
        if reason == "cancelled":
            self.told(known, "cancelled")
        elif reason in WHOLE:
            self.told(known, "done")

    def event(self, known: Known, event: dict[str, Any], after: int) -> int:
        """Checks an event of a response that follows event `after`; returns the event's number.

        Returns `after` for an event `error`, which has no number of its own.
        """
        number, kind = int(event["sequence_number"]), str(event["type"])
        if kind == "error":
            return after  # it has no number
        if number != after + 1:
            self.error(f"{known.key}: event {number} behind {after}")
        content = (kind, str(event.get("delta", "")))
        with self._lock:
            first = self.events.setdefault((known.id, number), content)
        if first != content:
            self.error(f"{known.key}: event {number} was {first}, is {content}")
        return number
