"""The actors of the simulator: expected output, a worker that makes it, a client that checks it.

The client is the real client (`mlxpool.client.retry`, `stream`, `request`) without its thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mlxpool.broker.workers.liveness import Sample
from mlxpool.client.request import resumed
from mlxpool.client.retry import Action, Pace, SilenceTimer, StreamRetry
from mlxpool.client.stream import Frame, StreamState, frame_of_row, parse_frame
from mlxpool.common.errors import BrokerLost, from_body
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import GenerateDraft
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from support import kinds

DIGEST = "sim"
HELD, STOP = 5, 41  # ids whose multiples may begin (5) or end (41) a stop string
# These times are set here, so that clients on the virtual clock wait no longer than real clients.
PACE = Pace(tick=0.5, gap=0.5, connect_grace=60.0, overdue=1.0)


class Violation(AssertionError):
    """A promise of the pool to its clients is broken."""


# ---- the true output -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Truth:
    """An expected completion: the first k token ids come with `cuts[k]` characters of `text`."""

    ids: bytes
    count: int
    text: str
    cuts: tuple[int, ...]
    reason: str

    @property
    def whole(self) -> int:
        """The number of characters of the final text.

        The final text includes held-back text, but not a stop string.
        """
        return len(self.text) if self.reason == "length" else self.cuts[self.count]


@lru_cache(maxsize=256)
def truth(seed: int, most: int) -> Truth:
    """Returns the expected completion of a seed, up to a stop or `most` token ids."""
    ids: list[int] = []
    pieces, cuts, length, reason = [], [0], 0, "length"
    while len(ids) < most:
        position = len(ids)
        token = ((seed + 7919 * position) * 2654435761 >> 9) % 997 + 1
        ids.append(token)
        pieces.append(f"{token} ")
        length += len(pieces[-1])
        if token % STOP == 0:
            cuts.append(cuts[-1])
            reason = "stop"
            break
        cuts.append(cuts[-1] if token % HELD == 0 else length)
    return Truth(pack_ids(ids), len(ids), "".join(pieces), tuple(cuts), reason)


# ---- a worker ------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Run:
    id: bytes
    run: int
    truth: Truth
    pos: int
    starts_at: float  # end of the run's prefill
    facts: Mapping[str, Any] | None


@dataclass(eq=False)
class Worker:
    """A worker process in a slot. `send` sends a frame on its connection."""

    slot: str
    send: Callable[[str, Any], None]
    capacity: int
    conn: Any = None
    epoch: int = 0
    alive: bool = True
    ready: bool = False
    hung: bool = False  # the compute thread hangs
    mute: bool = False  # the main thread hangs, too
    frozen_until: float = 0.0
    stepping: bool = False
    works: int = 0
    count: int = 0
    edge: int = 0
    runs: dict[tuple[bytes, int], Run] = field(default_factory=dict)
    over: list[Run] = field(default_factory=list)  # cancelled runs; the next step confirms them

    def begin_again(self, epoch: int) -> None:
        self.epoch, self.works = epoch, 0
        self.runs.clear()
        self.over.clear()

    def told(
        self, header: Header, body: Mapping[str, Any], blobs: tuple[bytes, ...], now: float
    ) -> None:
        key = (header.id or b"", header.attempt)
        if header.kind == kinds.WORK:
            self.works += 1
            self._work(key, body, blobs, now)
        elif header.kind == kinds.CANCEL and key in self.runs:
            self.over.append(self.runs.pop(key))
        elif header.kind == kinds.DRAIN:
            keys = list(self.runs)
            self.runs.clear()
            self.send("yield", [[ident, run] for ident, run in keys])

    def _work(
        self, key: tuple[bytes, int], body: Mapping[str, Any], blobs: tuple[bytes, ...], now: float
    ) -> None:
        resume = body.get("resume", {})
        have = int(resume.get("count", 0))
        expected = truth(int(body["seed"]), int(body["options"]["max_tokens"]))
        if have and blobs[-1] != expected.ids[: 4 * have]:
            raise Violation(f"a worker is to go on after ids that nobody made: {have}")
        facts = None if "facts" in resume else {"digest": DIGEST, "prompt_tokens": 1}
        self.runs[key] = Run(*key, expected, have, now + 0.1 + 0.02 * (self.count % 7), facts)

    def step(self, ids: int, now: float) -> bool:
        """Runs one step of each run. Returns whether a run ended, and so freed its sequence."""
        self.count += 1
        rows = [Delta(r.id, r.run, r.pos, "", b"", end={"reason": "cancelled"}) for r in self.over]
        self.over.clear()
        for run in [r for r in self.runs.values() if r.starts_at <= now]:
            rows.append(self._row(run, ids))
        if rows:
            self.send("deltas", rows)
        return any(row.end is not None for row in rows)

    def _row(self, run: Run, ids: int) -> Delta:
        expected, start = run.truth, run.pos
        run.pos = min(start + ids, expected.count)
        end = None
        if run.pos == expected.count:
            del self.runs[run.id, run.run]
            rest = expected.text[expected.cuts[run.pos] : expected.whole]
            usage = {"prompt_tokens": 1, "completion_tokens": expected.count}
            end = {"reason": expected.reason, "text": rest, "usage": usage}
        text = expected.text[expected.cuts[start] : expected.cuts[run.pos]]
        facts, run.facts = run.facts, None
        blob = expected.ids[4 * start : 4 * run.pos]
        return Delta(run.id, run.run, start, text, blob, None, dict(facts) if facts else None, end)

    def credit(self) -> None:
        free = max(0, self.capacity - len(self.runs) - len(self.over))
        self.send("credit", {"sequences": free, "works": self.works})

    def prefilling(self, now: float) -> bytes | None:
        return next((run.id for run in self.runs.values() if run.starts_at > now), None)

    def sample(self, now: float) -> Sample:
        """Returns the sample that the worker's supervisor takes."""
        reads = self.prefilling(now)
        phase = "load" if not self.ready else "idle"
        if self.runs or self.over or (self.hung and self.ready):
            phase = "prefill" if reads else "decode"
        look = ProgressReading(phase, 0, self.count, request=reads, edge_ns=self.edge)
        return Sample(look, stopped=now < self.frozen_until)


# ---- a client ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stream:
    """A stream, and the output that its reader has seen."""

    state: StreamState
    retry: StreamRetry
    draft: GenerateDraft
    most: int
    deadline: float = math.inf
    slow: bool = False  # reads only a few ids per second
    truth: Truth | None = None
    shown: int = 0  # characters of the text read so far
    read: int = 0
    acked: int = 0
    ended: set[int] = field(default_factory=set)  # attempts that have ended

    def left(self, now: float) -> float | None:
        return None if math.isinf(self.deadline) else self.deadline - now


@dataclass(eq=False)
class Client:
    """A client process with one connection. `send` sends a frame, `replace` reconnects."""

    number: int
    send: Callable[[Header, Mapping[str, Any], tuple[bytes, ...]], None]
    replace: Callable[[], None]
    timer: SilenceTimer
    streams: dict[bytes, Stream] = field(default_factory=dict)
    finished: list[Stream] = field(default_factory=list)
    frozen_until: float = 0.0
    ping_at: float = 0.0
    ticking: bool = False

    def open(self, stream: Stream) -> None:
        self.streams[stream.state.id] = stream
        draft = stream.draft
        self.send(Header(kinds.GENERATE, stream.state.id, 0, 1), draft.body(), draft.blobs())
        stream.retry.sent(self.timer.now)

    def cancel(self, stream: Stream) -> None:
        if stream.state.id in self.streams:
            self.send(Header(kinds.CANCEL, stream.state.id), {}, ())
            stream.retry.cancel_sent(self.timer.now)

    def turn(self, now: float) -> None:
        self.timer.advance(now)
        if not self.streams:
            self.timer.reset()

    def received(self, message: Message, now: float) -> None:
        self.turn(now)
        self.timer.heard()
        kind, ident = message.kind, message.header.id
        if kind == kinds.DELTAS:
            for row in deltas.unpack_deltas(message):
                self._frame(kinds.DELTA, row.id, frame_of_row(row), now)
        elif kind == kinds.PONG:
            self._at_home(int(message.body["boot"]), int(message.body["link"]), now)
        elif kind == kinds.FATE:
            stream = self.streams.get(ident or b"")
            if stream is not None:
                stream.retry.fate(str(message.body["state"]), self.timer.now)
                self._settle(stream)
        elif ident is not None:
            frame = parse_frame(message)
            assert frame is not None
            self._frame(kind, ident, frame, now)
        elif kind == kinds.ERROR:
            stream = self.streams.get(message.body.get("about") or b"")
            if stream is not None:
                error, attempt = from_body(message.body), message.header.attempt
                stream.state.error = stream.retry.error_of_sending(error, attempt)
                self._settle(stream)

    def _frame(self, kind: str, ident: bytes, frame: Frame, now: float) -> None:
        stream = self.streams.get(ident)
        if stream is None:
            self._too_late(kind, ident, frame)
            return
        state, retry, had = stream.state, stream.retry, stream.state.accepted
        delta = retry.receive(frame, self.timer.now, stream.left(now))
        if state.gap:
            raise Violation(f"a gap on one connection: {state.gap}")
        if delta is not None:
            self._show(stream, delta.text)
        if kind in (kinds.DONE, kinds.ERROR):
            stream.ended.add(frame.attempt)
        if state.over:
            self._settle(stream)
        elif retry.due <= self.timer.now:
            self._step(stream, now)
        elif state.accepted and not had:
            stream.truth = truth(state.seed, stream.most)
            self._at_home(state.boot, state.link, now)

    def _too_late(self, kind: str, ident: bytes, frame: Frame) -> None:
        for stream in self.finished:
            if stream.state.id == ident and frame.attempt in stream.ended:
                raise Violation(f"{kind} after the terminal of {stream.state.attempt}")

    def _show(self, stream: Stream, text: str) -> None:
        """Checks each new token id and character."""
        expected, ids = stream.truth, stream.state.ids
        if expected is None:
            raise Violation("a delta before accepted")
        if pack_ids(ids) != expected.ids[: 4 * len(ids)]:
            raise Violation(f"ids {ids} are not {unpack_ids(expected.ids)}")
        stream.shown += len(text)
        rest = stream.state.result is not None
        due = expected.whole if rest else expected.cuts[len(ids)]
        if rest and stream.state.result is not None and stream.state.result.reason == "cancelled":
            return
        if "".join(stream.state.texts) != expected.text[:due]:
            raise Violation(
                f"text after {len(ids)} ids: {stream.state.texts}, not {expected.text[:due]!r}"
            )
        if not stream.slow:
            stream.read = len(ids)

    def _step(self, stream: Stream, now: float) -> None:
        state, left = stream.state, stream.left(now)
        step = stream.retry.tick(self.timer.now, self.timer.heard_at, left)
        if step is Action.SEND:
            draft = resumed(stream.draft, state, left)
            stream.retry.sent_again(self.timer.now)
            stream.acked = stream.read = len(state.ids)
            header = Header(kinds.GENERATE, state.id, 0, state.attempt)
            self.send(header, draft.body(), draft.blobs())
        elif step is Action.CANCEL:
            self.cancel(stream)
        elif step is Action.GIVE_UP:
            state.error = BrokerLost("overdue")
        self._settle(stream)

    def _settle(self, stream: Stream) -> None:
        if stream.state.over and self.streams.pop(stream.state.id, None) is not None:
            self.finished.append(stream)

    def _at_home(self, boot: int, link: int, now: float) -> None:
        for stream in list(self.streams.values()):
            stream.retry.identified((boot, link), self.timer.now)
            self._step(stream, now)

    def tick(self, now: float) -> None:
        """Runs the client's due timers: reconnects, retries, acknowledgements and pings."""
        self.turn(now)
        if self.timer.lost:
            raise Violation("a client gives up on its broker")
        if self.timer.reconnect_due and self.streams:
            self.replace()
            self.timer.reconnected()
            for stream in self.streams.values():
                stream.retry.reconnected(self.timer.now)
        for stream in list(self.streams.values()):
            self._step(stream, now)
        if now >= self.ping_at and self.streams:
            self.ping_at = now + PACE.ping
            self._ack()
            self.send(Header(kinds.PING), {}, ())

    def _ack(self) -> None:
        have = []
        for stream in self.streams.values():
            if stream.slow:
                stream.read = min(len(stream.state.ids), stream.read + 3)
            if stream.state.accepted and stream.read > stream.acked:
                stream.acked = stream.read
                have.append([stream.state.id, stream.read])
        if have:
            self.send(Header(kinds.ACK), {"have": have}, ())
