"""Simulates clients, workers and a clock around the broker's core, without sockets.

Every action is checked immediately: its message fits the protocol, and positions continue without a
gap. Each accepted (id, attempt) gets an end and no frame after it. Work goes only to a READY worker
with free sequences. A fake worker's token at position i is i, so that a client can check its
tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.models.model import DEMANDED, Model
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.broker.workers.liveness import Sample
from mlxpool.broker.workers.worker import Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol import frames as wire
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from support import core_events as make
from support import kinds

BOOT = 77
START = 1000.0
ENTROPY = 4242
OWNER = "uid:1"


def request_id(number: int) -> bytes:
    return number.to_bytes(wire.ID_BYTES, "big")


X = request_id(900)  # an id that a test chooses
BOB = "uid:2"


def model(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"path": "builtin:counting", **settings})


@dataclass(eq=False)
class Run:
    """A run of a request, as its worker sees it."""

    attempt: int
    pos: int
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...]


@dataclass(eq=False)
class Heard:
    """The frames of one (id, attempt), as its client sees them."""

    pos: int | None = None  # None: a resume without a frame; the first frame sets it
    ids: list[int] = field(default_factory=list)
    text: str = ""
    frames: int = 0
    link: int = 0  # the link of the stream
    forgotten: bool = False  # its link timed out: no more frames may arrive
    ended: act.ToClient | None = None


class FakeWorker:
    """Sends the messages of a worker, and records the messages to the worker."""

    def __init__(self, story: Story, slot: str) -> None:
        self.story = story
        self.slot = slot
        self.epoch = 0
        self.capacity = 0
        self.works = 0
        self.runs: dict[bytes, Run] = {}
        self.cancelled: list[tuple[bytes, int]] = []
        self.asked: list[act.ToWorker] = []
        self.heard = 0
        self.stopped = False
        self.draining = False
        self.dumps = 0
        self.moves = 0

    def told(self, action: act.ToWorker) -> None:
        kind, request = action.header.kind, action.header.id
        if kind == kinds.WELCOME:
            self.epoch, self.works = action.header.epoch, 0
            self.runs.clear()
        elif kind == kinds.WORK:
            assert request is not None
            self.works += 1
            body, blobs = body_of(action), action.message.blobs()
            have = int(body.get("resume", {}).get("count", 0))
            if "resume" in body:
                assert blobs[-1] == pack_ids(range(have)), "not the ids that were taken"
            self.runs[request] = Run(action.header.attempt, have, body, blobs)
        elif kind == kinds.DRAIN:
            self.draining = True
        elif kind == kinds.CANCEL:
            assert request is not None
            self.cancelled.append((request, action.header.attempt))
        elif kind == kinds.HEARD:
            self.heard += 1
        else:
            self.asked.append(action)

    def hello(self, **body: Any) -> FakeWorker:
        self.story.do(make.hello(self.slot, {"context": 2048, **body}))
        return self

    def credit(self, capacity: int | None = None) -> FakeWorker:
        """Reports how many further runs the worker has room for: `capacity` minus its runs.

        Without `capacity` the last capacity is used.
        """
        self.capacity = self.capacity if capacity is None else capacity
        free = max(0, self.capacity - len(self.runs))
        self.story.do(make.credit(self.epoch, {"sequences": free, "works": self.works}))
        return self

    def row(self, request: bytes, count: int = 0, **parts: Any) -> Delta:
        """Returns the next `count` tokens of a run as one row of a `deltas` message."""
        run = self.runs[request]
        ids = range(run.pos, run.pos + count)
        row = Delta(
            request,
            parts.get("attempt", run.attempt),
            parts.get("pos", run.pos),
            parts.get("text", "".join(f"<{i}>" for i in ids)),
            pack_ids(ids),
            parts.get("logprobs"),
            parts.get("facts"),
            parts.get("end"),
        )
        run.pos += count
        if row.end is not None:
            del self.runs[request]
        return row

    def say(self, *rows: Delta, epoch: int | None = None) -> list[act.Action]:
        return self.story.do(ev.WorkerDeltas(self.epoch if epoch is None else epoch, rows))

    def tokens(self, request: bytes, count: int = 1, **parts: Any) -> list[act.Action]:
        """Sends a `deltas` frame with one row."""
        return self.say(self.row(request, count, **parts))

    def end(
        self, request: bytes, reason: str = "stop", count: int = 0, rest: str = ""
    ) -> list[act.Action]:
        """Sends the last `count` tokens and the end in one row; `rest` is text held back so far."""
        end = {"reason": reason, "text": rest, "usage": {"completion_tokens": count}}
        return self.tokens(request, count, end=end)

    def fail(self, request: bytes, code: str = "internal", message: str = "no") -> list[act.Action]:
        return self.tokens(request, end={"code": code, "message": message}, count=0, text="")

    def confirm(self, request: bytes) -> None:
        """Reports to the broker that a cancelled run has ended."""
        self.end(request, "cancelled")

    def bye(self, code: str, message: str) -> None:
        error = {"code": code, "message": message, "retryable": False}
        self.story.do(make.bye(self.epoch, error))

    def die(
        self, cause: str = "killed by SIGKILL", *, own: bool = False, prefill: bytes | None = None
    ) -> list[act.Action]:
        self.runs.clear()
        return self.story.do(ev.WorkerExited(self.slot, cause, own, prefill))

    def give_back(self, *requests: bytes) -> list[act.Action]:
        """Gives these runs, or all, back to the broker, as a worker does at a drain."""
        named = requests or tuple(self.runs)
        runs = [[request, self.runs.pop(request).attempt] for request in named]
        return self.story.do(make.handed_back(self.epoch, runs))

    def look(self, look: ProgressReading | None = None, **sample: Any) -> list[act.Action]:
        """Sends the core one observation of the worker, as the supervisor does every second."""
        return self.story.do(
            ev.Looked(self.slot, Sample(look or ProgressReading("idle"), **sample), 1.0)
        )

    def watched(self, seconds: int, look: ProgressReading, **sample: Any) -> None:
        """Sends the core the same observation each second, for `seconds` seconds.

        Before each observation the clients send pings, and the worker sends a heartbeat.
        """
        for _ in range(seconds):
            for link in list(self.story.core.state.links):
                self.story.hear(link)
            self.story.later(1.0)
            self.beat()
            self.look(look, **sample)

    def beat(self, **body: Any) -> list[act.Action]:
        return self.story.do(make.beat(self.epoch, body))

    @property
    def state(self) -> WorkerState:
        worker = self.story.core.state.registry.slots[self.slot].worker
        return WorkerState.LOST if worker is None else worker.state

    def assert_is(self, state: WorkerState) -> None:
        assert self.state is state, f"{self.slot} is {self.state.value}, not {state.value}"


class Story:
    """A simulation: a core, its links and its workers. `last` has the actions of the last call."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig] | None = None,
        *,
        needs: Mapping[str, int] | None = None,
        memory: int = 1 << 62,
        **settings: Any,
    ) -> None:
        config = PoolConfig(
            run_dir=Path("/nowhere"), models=models or {"m": model(), "other": model()}, **settings
        )
        self.core = Core(config, BOOT, needs, memory)
        self.now = START
        self.last: list[act.Action] = []
        self.workers: dict[str, FakeWorker] = {}
        self.heard: dict[tuple[bytes, int], Heard] = {}
        self.pool_stopped = 0
        self.requests_made = 0

    # ---- events --------------------------------------------------------------------------------

    def do(self, event: ev.Event) -> list[act.Action]:
        """Performs an event at the present time."""
        self.last = list(self.core.handle(event, self.now))
        for action in self.last:
            self.check_action(action)
        return self.last

    def later(self, seconds: float) -> list[act.Action]:
        """Advances the clock, and wakes the core whenever it is due."""
        end, actions = self.now + seconds, []
        while self.core.next_wake() <= end:
            self.now = max(self.now, self.core.next_wake())
            actions += self.do(ev.Wake())
        self.now, self.last = end, actions
        return actions

    def generate(
        self,
        request: bytes | None = None,
        *,
        name: str = "m",
        link: int = 1,
        owner: str = OWNER,
        attempt: int = 1,
        blobs: Sequence[bytes] = (),
        options: Any = None,
        **body: Any,
    ) -> bytes:
        """Sends a client's `generate` to the core; returns its id, by default a new id."""
        if request is None:
            self.requests_made += 1
            request = request_id(self.requests_made)
        if not {"prompt", "messages", "tokens"} & body.keys():
            body["prompt"] = "hello"
        body = {"model": name, "options": options or {}, **body}
        header = Header(kinds.GENERATE, request, 0, attempt)
        self.do(make.client(link, owner, header, body, tuple(blobs), ENTROPY))
        return request

    def cancel(
        self, request: bytes, link: int | None = 1, owner: str | None = OWNER
    ) -> list[act.Action]:
        return self.do(ev.CancelRequest(link, owner, request))

    def ack(self, request: bytes, count: Any, link: int = 1) -> list[act.Action]:
        return self.do(make.ack(link, [[request, count]]))

    def ask(self, kind: str, link: int = 1, *blobs: bytes, **body: Any) -> bytes:
        self.requests_made += 1
        ident = request_id(self.requests_made)
        self.do(make.call(link, kind, ident, 3, body, blobs))
        return ident

    def hear(self, link: int = 1) -> None:
        self.do(ev.ClientHeard(link))

    def ready_worker(
        self, name: str = "m", sequences: int = 4, replica: int = 0, **hello: Any
    ) -> FakeWorker:
        """Returns a started and welcomed worker of a slot, with `sequences` free sequences."""
        slot = f"{name}/{replica}"
        self._wait_out(name, slot)
        if self.core.state.registry.slots[slot].worker is None:
            self.do(ev.LoadModel(name))
        return self.workers[slot].hello(**hello).credit(sequences)

    def _wait_out(self, name: str, slot: str) -> None:
        """Waits for the restart of a slot's lost worker."""
        model = self.core.state.registry.models[name]
        restarts = model.state in DEMANDED or ("restart", name) in self.core.state.timers
        while (
            restarts
            and slot in self.workers
            and self.core.state.registry.slots[slot].worker is None
        ):
            for link in list(self.core.state.links):
                self.hear(link)
            self.later(0.5)

    def running(self, sequences: int = 4, **request: Any) -> tuple[FakeWorker, bytes]:
        """Returns a ready worker, and a request that runs on this worker."""
        worker = self.ready_worker(sequences=sequences)
        request_id = self.generate(**request)
        assert self.request(request_id).state is RequestState.ASSIGNED
        return worker, request_id

    # ---- the state -------------------------------------------------------------------------

    def request(self, request: bytes) -> Request:
        return self.core.state.requests[request]

    def model(self, name: str = "m") -> Model:
        return self.core.state.registry.models[name]

    def to_client(self, kind: str | None = None, link: int | None = None) -> list[act.ToClient]:
        """Returns the last call's messages to clients, of one kind and one link if given."""
        return [
            action
            for action in self.last
            if isinstance(action, act.ToClient)
            and kind in (None, action.header.kind)
            and link in (None, action.link)
        ]

    def started(self) -> list[str]:
        """Returns the slots whose workers the last call started."""
        return [action.slot for action in self.last if isinstance(action, act.StartWorker)]

    def stopped(self) -> list[str]:
        return [action.slot for action in self.last if isinstance(action, act.StopWorker)]

    def assert_sent(self, link: int, kind: str, /, **fields: Any) -> act.ToClient:
        """Asserts that the last call sent exactly one frame with these fields of body or header."""
        frames = self.to_client(kind, link)
        shown = [(a.link, a.header.kind, body_of(a)) for a in self.to_client()]
        assert len(frames) == 1, f"not one {kind} to {link} in {shown}"
        frame = frames[0]
        for key, value in fields.items():
            has = getattr(frame.header, key) if key in ("id", "pos", "attempt") else None
            has = body_of(frame).get(key) if has is None else has
            assert has == value, f"{kind}.{key} is {has!r}, not {value!r}"
        return frame

    def assert_refused(self, code: str, *words: str, link: int = 1) -> act.ToClient:
        """Asserts that the last call answered with an error and accepted no request."""
        frame = self.assert_sent(link, kinds.ERROR, code=code)
        assert not self.to_client(kinds.ACCEPTED)
        for word in words:
            assert word in body_of(frame)["message"], body_of(frame)["message"]
        return frame

    def assert_ended(self, request: bytes, outcome: str, attempt: int = 1) -> act.ToClient:
        """Asserts that the stream has its end: a `reason` or an error's `code`."""
        ended = self.heard[request, attempt].ended
        assert ended is not None, "the stream has not ended"
        assert outcome in (body_of(ended).get("reason"), body_of(ended).get("code")), body_of(ended)
        return ended

    def assert_conserved(self) -> None:
        """Asserts that each accepted request has ended or is live, for each model and in total."""
        counters = self.core.state.counters
        ended = counters.done + counters.failed + counters.cancelled
        assert counters.accepted == ended + len(self.core.state.requests)
        live = Counter(request.model for request in self.core.state.requests.values())
        for name, figures in counters.models.items():
            assert figures.accepted == figures.outcomes.total() + live[name], name
        for key in ("accepted", "resumed", "tokens", "prompt_tokens"):
            by_model = sum(getattr(figures, key) for figures in counters.models.values())
            assert by_model == getattr(counters, key), key

    def assert_idle(self) -> None:
        """Asserts that no request remains except tombstones, the records of ended requests."""
        core = self.core
        assert not core.state.requests and not core.state.calls
        for owner_model in core.state.registry.models.values():
            assert not owner_model.queue and not owner_model.queue.bytes and not owner_model.calls
            assert not list(owner_model.queue), "the queue's count is wrong"
            assert not any(owner_model.queue.ranked), "the queue's count of ranks is wrong"
            assert not owner_model.queue.charged, "the queue's count of charged requests is wrong"
            assert not owner_model.places.held, "the places of owners are wrong"
            assert not any(
                w.leases or w.batch_bounds or w.reading or w.calls for w in owner_model.workers
            )
        assert not any(link.ids or link.calls for link in core.state.links.values())

    # ---- the checks ----------------------------------------------------------------------------

    def check_action(self, action: act.Action) -> None:
        if isinstance(action, act.ToClient):
            wire.encode(action.header, body_of(action), action.message.blobs())
            self._to_client(action)
        elif isinstance(action, act.ToWorker):
            wire.encode(
                action.header,
                body_of(action),
                action.message.blobs(),
                max_body=wire.MAX_BACK_BODY,
            )
            if action.header.kind == kinds.WORK:
                self._check_work(action)
            self.workers[action.slot].told(action)
        elif isinstance(action, act.StartWorker):
            self.workers[action.slot] = FakeWorker(self, action.slot)
        elif isinstance(action, act.StopWorker):
            self.workers[action.slot].stopped = True
        elif isinstance(action, act.DumpStacks):
            self.workers[action.slot].dumps += 1
        elif isinstance(action, act.ForgetLink):
            for stream in self.heard.values():
                stream.forgotten |= stream.link == action.link and stream.ended is None
        elif isinstance(action, act.StopPool):
            assert not self.core.state.requests, "the pool stops under a stream"
            self.pool_stopped += 1

    def _check_work(self, action: act.ToWorker) -> None:
        worker = self.core.state.registry.slots[action.slot].worker
        assert worker is not None and worker.state is WorkerState.READY
        assert worker.epoch == action.header.epoch
        assert owed(worker) >= 0, "work beyond the worker's credit"
        bounds = [
            self.core.state.requests[r].run.batch_bound
            for r, run in worker.leases
            if self._at(r, run)
        ]
        company = min((bound for bound in bounds if bound), default=len(worker.leases))
        assert len(worker.leases) <= company, "more company than a charged request may have"

    def _at(self, request: bytes, run: int) -> bool:
        live = self.core.state.requests.get(request)
        return live is not None and live.run.number == run

    def _to_client(self, action: act.ToClient) -> None:
        header = action.header
        assert header.epoch == BOOT
        if header.kind == kinds.DELTAS:
            message = wire.Message(header, body_of(action), action.message.blobs())
            for row in deltas.unpack_deltas(message):
                self._delta((row.id, row.attempt), row.pos, row.text, unpack_ids(row.ids))
        elif header.id is not None:
            self._frame(action, (header.id, header.attempt))

    def _frame(self, action: act.ToClient, key: tuple[bytes, int]) -> None:
        kind, body = action.header.kind, body_of(action)
        if kind == kinds.ACCEPTED:
            stream = self.heard.setdefault(key, Heard())
            assert stream.ended is None, "accepted after the end"
            stream.link = body["link"]
        elif kind == kinds.DELTA:
            ids = unpack_ids(action.message.blobs()[0])
            assert body["n"] == len(ids)
            self._delta(key, action.header.pos, body["text"], ids)
        elif kind in (kinds.DONE, kinds.ERROR) and key in self.heard:
            stream = self.heard[key]
            assert stream.ended is None, f"a second terminal {key} {stream.ended} {action}"
            assert not stream.forgotten, f"a terminal on a forgotten link {key} {action}"
            assert stream.pos in (None, action.header.pos), "the terminal's pos"
            stream.ended = action
            stream.text += body.get("text", "")

    def _delta(self, key: tuple[bytes, int], pos: int, text: str, ids: list[int]) -> None:
        stream = self.heard[key]
        assert stream.ended is None, "a delta after the terminal"
        assert not stream.forgotten, "a delta on a forgotten link"
        assert stream.pos in (None, pos), f"pos is {pos}, {stream.pos} was due"
        assert ids == list(range(pos, pos + len(ids))), "ids that the worker did not send there"
        stream.pos = pos + len(ids)
        stream.ids += ids
        stream.text += text
        stream.frames += 1


def wake_until_idle(story: Story) -> list[int]:
    """Wakes the core for due events; returns the numbers of streams that the events ended."""
    left = [len(story.core.state.requests)]
    while story.core.next_wake() <= story.now:
        story.do(ev.Wake())
        left.append(len(story.core.state.requests))
    return [before - after for before, after in itertools.pairwise(left)]


def body_of(action: act.ToClient | act.ToWorker) -> dict[str, Any]:
    """Returns the body of a message."""
    return action.message.body() or {}


def owed(worker: Worker) -> int:
    """Returns the number of runs that the core may still give to a worker.

    It is the number of free sequences in the worker's last report, minus the work that the report
    did not include.
    """
    return worker.sequences - (worker.works_sent - worker.works_seen)
