"""The core under events in any order: its invariants hold after each event.

`Story` itself checks every frame (positions, ids, ends, credit, bounds of batches); the invariants
here relate frames to each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.broker.workers.gpu_places import GpuPlaces
from mlxpool.broker.workers.worker import FENCED, Worker, WorkerState
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol.token_ids import pack_ids
from support import core_events as make
from support import kinds
from support.core_harness import FakeWorker, Story, model, owed, request_id

IDS = [request_id(n) for n in range(101, 107)]  # ids of calls have lower numbers
LINKS = (1, 2, 3)
MEMORY = 10  # memory for two of the three workers
NOT_DURABLE = IDS[5]
GPUS = ("0", "1")

ids = st.sampled_from(IDS)
links = st.sampled_from(LINKS)
replicas = st.integers(0, 1)
phases = st.sampled_from(["idle", "load", "prefill", "decode", "blocked"])


class PlacedStory(Story):
    """A Story with GPUs: each worker has a GPU from its start until it exits or fails to start.

    GpuPlaces raises if the core starts the worker of a slot whose process has not ended.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        self.places = GpuPlaces()
        super().__init__(*given, **options)

    def do(self, event: ev.Event) -> list[act.Action]:
        over = isinstance(event, ev.WorkerExited | ev.SpawnFailed)
        if over and (slot := getattr(event, "slot", "")) in self.places.held():
            self.places.release(slot)
        actions = super().do(event)
        for action in actions:
            if isinstance(action, act.StartWorker):
                self.places.take(action.slot, GPUS, 1)
        slots = self.core.state.registry.slots.values()
        local = {slot.name for slot in slots if slot.worker and not slot.worker.remote}
        assert self.places.held().keys() == local
        return actions


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        models = {"m": model(replicas=2, keep_alive=20.0), "other": model(keep_alive=-1)}
        self.story = PlacedStory(
            models,
            needs={"m": 4, "other": 4},
            memory=MEMORY,
            queue_limit=4,
            unread_bytes=2048,
            poison_life=100.0,
        )
        self.newest: dict[bytes, int] = {}  # id -> newest attempt
        self.lost: set[int] = set()
        self.steps = 0

    @initialize()
    def begin(self) -> None:
        self.serve(0)
        for link, request in zip(LINKS, IDS, strict=False):
            self.send(request, link, 1, window=link, batch=link == 2)

    def send(self, request: bytes, link: int, attempt: int, have: int = 0, **body: Any) -> None:
        """Sends `generate`; the content of a request depends only on its id."""
        number = IDS.index(request)
        self.newest[request] = max(attempt, self.newest.get(request, 0))
        blobs = [pack_ids(range(have))] if have else []
        if have:
            body["resume"] = {"count": have}
        if request == NOT_DURABLE:
            body["durable"] = False
        self.story.generate(
            request, link=link, attempt=attempt, blobs=blobs, priority=number % 3, **body
        )

    def busy(self, replica: int) -> FakeWorker | None:
        """Returns a worker with runs, preferably that of `replica`; None if no worker has runs."""
        for number in (replica, 1 - replica):
            worker = self.pick(number)
            if worker is not None and worker.runs:
                return worker
        return None

    def pick(self, replica: int) -> FakeWorker | None:
        worker = self.story.workers.get(f"m/{replica}")
        return worker if worker and worker.state is not WorkerState.LOST else None

    # ---- clients -----------------------------------------------------------------------------

    @rule(
        request=ids,
        link=links,
        attempt=st.integers(1, 3),
        batch=st.booleans(),
        window=st.sampled_from([1, 3, 1000]),
        deadline=st.sampled_from([None, 3_000, 10_000]),
        queue=st.sampled_from([None, 1_000]),
    )
    def submit(
        self,
        request: bytes,
        link: int,
        attempt: int,
        batch: bool,
        window: int,
        deadline: int | None,
        queue: int | None,
    ) -> None:
        """Sends a request for the first time or again, in any state of the request."""
        times: dict[str, Any] = {"deadline_ms": deadline, "queue_ms": queue}
        if request == IDS[4]:  # a field that each retry of IDS[4] has to repeat
            times["first_token_ms"] = 2_000
        self.send(request, link, attempt, batch=batch, window=window, **times)

    @rule(request=ids, link=links, share=st.integers(0, 3), window=st.sampled_from([1, 1000]))
    def resend(self, request: bytes, link: int, share: int, window: int) -> None:
        """Sends a request again, with `share` thirds of the ids that were sent to its client."""
        core = self.story.core
        live, tomb = core.state.requests.get(request), core.state.tombstones.get(request)
        known = live or tomb
        if known is None:
            return
        sent = live.reader.sent if live is not None else core.state.tombstones[request].pos
        first: dict[str, Any] = {"first_token_ms": 2_000} if request == IDS[4] else {}
        have = sent * share // 3
        self.send(request, link, known.attempt + 1, have, window=window, **first)

    @rule(request=ids, link=links, other_owner=st.booleans())
    def duplicate(self, request: bytes, link: int, other_owner: bool) -> None:
        known = (
            request in self.story.core.state.requests or request in self.story.core.state.tombstones
        )
        if not known:
            return
        if other_owner:
            self.story.generate(request, link=link, attempt=9, owner="uid:2")
        else:
            self.story.generate(request, link=link, attempt=9, prompt="another")
        frame = self.story.assert_sent(link, "error", code="duplicate_id")
        assert frame.header.id is None

    @rule(request=ids, link=links)
    def foreign_ids(self, request: bytes, link: int) -> None:
        """Sends ids that differ from those of the stream; only this stream may end."""
        live = self.story.core.state.requests.get(request)
        if live is None or request in (NOT_DURABLE, IDS[4]) or link in self.lost:
            return
        known = self.story.core.state.links.get(link)
        if known is not None and known.lost:  # lost by silence: its client gets no frame
            return
        others = set(self.story.core.state.requests) - {request}
        attempt = live.attempt + 1
        self.newest[request] = max(self.newest[request], attempt)
        self.story.generate(
            request,
            link=link,
            attempt=attempt,
            resume={"count": 1},
            blobs=[pack_ids([7])],
            priority=IDS.index(request) % 3,
        )
        self.story.assert_sent(link, "error", id=request, attempt=attempt)
        assert set(self.story.core.state.requests) == others

    @rule(request=ids, link=links, owner=st.sampled_from(["uid:1", "uid:2", None]))
    def cancel(self, request: bytes, link: int, owner: str | None) -> None:
        self.story.cancel(request, link, owner)
        if owner != "uid:2":
            assert request not in self.story.core.state.requests

    @rule(request=ids, more=st.integers(-1, 5))
    def ack(self, request: bytes, more: int) -> None:
        known = self.story.core.state.requests.get(request)
        if known is not None:
            self.story.ack(request, known.reader.acked + more, known.reader.link)

    @rule(link=links)
    def hear(self, link: int) -> None:
        self.story.hear(link)

    @rule(link=links)
    def ask(self, link: int) -> None:
        self.story.ask(kinds.TOKENIZE, link, model="m", text="a")

    @rule(again=st.booleans(), link=links)
    def cancel_or_repeat_call(self, again: bool, link: int) -> None:
        ident = next(iter(self.story.core.state.calls), None)
        if ident is not None and again:
            body = {"model": "m", "text": "a"}
            self.story.do(make.call(link, kinds.TOKENIZE, ident, 4, body))
        elif ident is not None:
            self.story.cancel(ident, link, "")
            assert ident not in self.story.core.state.calls

    @rule()
    def lose_link(self) -> None:
        self.lost.add(3)  # the other links send signs of life until the end
        self.story.do(ev.LinkLost(3))

    # ---- workers -----------------------------------------------------------------------------

    @rule(replica=replicas)
    def hello(self, replica: int) -> None:
        worker = self.pick(replica)
        if worker is not None:
            worker.hello()

    @rule(replica=replicas)
    def serve(self, replica: int) -> None:
        """Loads the model; lets the replica's worker say `hello` and report room for three runs."""
        self.story.do(ev.LoadModel("m"))
        worker = self.pick(replica)
        if worker is not None:
            if not worker.epoch:
                worker.hello()
            if worker.epoch:
                worker.credit(3)

    @rule(replica=replicas, capacity=st.integers(0, 3))
    def credit(self, replica: int, capacity: int) -> None:
        worker = self.pick(replica)
        if worker is not None and worker.epoch:
            worker.credit(capacity)

    @rule(replica=replicas, count=st.integers(1, 3), many=st.booleans())
    def tokens(self, replica: int, count: int, many: bool) -> None:
        worker = self.busy(replica)
        if worker is not None:
            running = sorted(worker.runs)
            worker.say(*(worker.row(r, count) for r in (running if many else running[:1])))

    @rule(replica=replicas, count=st.integers(0, 2), outcome=st.sampled_from(["stop", "length"]))
    def end(self, replica: int, count: int, outcome: str) -> None:
        worker = self.busy(replica)
        if worker is None:
            return
        request = min(worker.runs)
        live, run = self.story.core.state.requests.get(request), worker.runs[request].attempt
        due = live.run.taken + count if live is not None and live.run.number == run else None
        worker.end(request, outcome, count)
        if due is not None and worker.state not in FENCED:
            assert self.story.core.state.tombstones[request].pos == due, "a tail that was not sent"

    @rule(replica=replicas)
    def error_end(self, replica: int) -> None:
        worker = self.busy(replica)
        if worker is not None:
            worker.fail(max(worker.runs), "out_of_memory")

    @rule(replica=replicas)
    def wrong_position(self, replica: int) -> None:
        worker = self.busy(replica)
        if worker is not None:
            request = min(worker.runs)
            worker.tokens(request, 1, pos=worker.runs[request].pos + 1)

    @rule(replica=replicas)
    def answer(self, replica: int) -> None:
        worker = self.pick(replica)
        if worker is not None and worker.asked:
            asked = worker.asked.pop(0)
            assert asked.header.id is not None
            self.story.do(make.tokens(asked.header.epoch, asked.header.id, {}, ()))

    @rule(
        replica=replicas,
        reason=st.sampled_from(["own", "outside", "prefill", "load", "device", "spawn"]),
    )
    def exit(self, replica: int, reason: str) -> None:
        worker = self.pick(replica)
        if worker is None:
            return
        if reason == "spawn" and not worker.epoch:
            self.story.do(ev.SpawnFailed(worker.slot, "no memory"))
            return
        if reason == "load" and worker.epoch and not worker.runs:
            worker.bye("model_load_failed", "a tensor is missing")
        if reason == "device" and worker.epoch:
            worker.bye("internal", "the device is lost")
        prefill = max(worker.runs, default=None) if reason == "prefill" else None
        worker.die(own=reason != "outside", prefill=prefill)

    @rule(replica=replicas, own=st.booleans(), count=st.integers(0, 2))
    def lose_and_go_on(self, replica: int, own: bool, count: int) -> None:
        """A worker makes some tokens and is lost; a new worker replaces it."""
        worker = self.busy(replica)
        if worker is None:
            return
        worker.say(*(worker.row(request, count) for request in sorted(worker.runs)))
        if worker.state is not WorkerState.LOST:
            worker.die(own=own)
        self.hear_all()
        self.story.later(3.0)
        self.hear_all()
        for number in (0, 1):
            self.serve(number)

    @rule(replica=replicas, count=st.integers(1, 2))
    def redial(self, replica: int, count: int) -> None:
        """A worker makes some tokens and reconnects."""
        worker = self.busy(replica)
        if worker is not None:
            worker.say(*(worker.row(request, count) for request in sorted(worker.runs)))
            worker.hello().credit(3)

    @rule(replica=replicas, phase=phases, seconds=st.sampled_from([1, 6, 12, 25]))
    def stand_still(self, replica: int, phase: str, seconds: int) -> None:
        """A worker sends heartbeats, but makes no progress: it becomes suspect.

        It is then condemned, or recovers.
        """
        worker = self.pick(replica)
        if worker is None:
            return
        worker.moves += 1
        prefill = max(worker.runs, default=None) if phase == "prefill" else None
        worker.watched(seconds, ProgressReading(phase, count=worker.moves, request=prefill))

    @rule(replica=replicas)
    def move_again(self, replica: int) -> None:
        worker = self.pick(replica)
        if worker is not None:
            worker.moves += 1
            worker.look(ProgressReading("decode", count=worker.moves))

    # ---- time and operations -----------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0, 13.0]), heard=st.booleans())
    def tick(self, seconds: float, heard: bool) -> None:
        if heard:
            self.hear_all()
        self.story.later(seconds)

    def hear_all(self) -> None:
        for link in list(self.story.core.state.links):
            self.story.hear(link)

    @rule(seconds=st.sampled_from([1.0, 10.0, 13.0]), told=st.booleans())
    def suspend(self, seconds: float, told: bool) -> None:
        """Lets the machine sleep: all due timers fire in one wake-up."""
        self.story.now += seconds
        if told:
            self.story.do(ev.Late(seconds))
        self.story.do(ev.Wake())

    @rule(
        what=st.sampled_from(
            [
                ev.LoadModel("m"),
                ev.LoadModel("other"),
                ev.UnloadModel("m"),
                ev.StartDrain(None, "m", 3.0),
                ev.RestartWorker("m/1"),
                *(ev.StartDrain(f"m/{n}", None, grace) for n in (0, 1) for grace in (0.0, 3.0)),
            ]
        )
    )
    def operate(self, what: ev.Event) -> None:
        self.story.do(what)

    @rule(replica=replicas)
    def give_back(self, replica: int) -> None:
        worker = self.busy(replica)
        if worker is not None and worker.draining:
            worker.give_back()

    @rule()
    def drain_pool(self) -> None:
        self.steps += 1
        if self.steps > 3:  # rarely, because a drain ends the sequence of events
            self.story.do(ev.StartDrain(None, None, 5.0))

    # ---- invariants --------------------------------------------------------------------------

    @invariant()
    def conservation(self) -> None:
        self.story.assert_conserved()

    @invariant()
    def every_live_request_is_whole(self) -> None:
        core = self.story.core
        for request in core.state.requests.values():
            assert request.live
            assert core.state.timers.at(request.id) <= request.deadline, "no timer"
            run, reader = request.run, request.reader
            assert reader.acked <= reader.sent <= run.taken
            unread = b"".join(chunk.ids for chunk in reader.unread)
            assert run.ids[4 * reader.sent :] == unread, "sent is no prefix of taken"
            assert reader.unread_bytes == sum(chunk.size for chunk in reader.unread)
            full = reader.sent - reader.acked >= reader.window
            assert full or not reader.unread, "it waits behind an open window"
            assert request.id in core.state.links[reader.link].ids
            assert run.resumes_without_progress <= (2 if run.charge < 1 else 4) and run.charge < 2
            self.check_lease(request)

    def check_lease(self, request: Request) -> None:
        """Checks that a request is in its model's queue while QUEUED, otherwise in a worker."""
        queue = self.story.model(request.message.model).queue
        worker = self.story.core.state.leaseholder(request)
        queued = request.state is RequestState.QUEUED
        assert sum(each is request for each in queue) == int(queued)
        key = (request.id, request.run.number)
        assert (worker is not None and key in worker.leases) != queued

    @invariant()
    def books_agree(self) -> None:
        core = self.story.core
        state = core.state
        assert not core.outbox.merged
        assert core.pool.memory_used() <= MEMORY
        for each in state.registry.models.values():
            waiting = list(each.queue)
            assert len(each.queue) == len(waiting)
            assert each.queue.bytes == sum(request.message.size for request in waiting)
            assert all(state.requests.get(request.id) is request for request in waiting)
            live = [request for request in state.requests.values() if request.model == each.name]
            running = [
                request.owner for request in live if request.state is not RequestState.QUEUED
            ]
            assert each.places.held == Counter(running), "places of owners"
            for worker in each.workers:
                self.check_worker(worker)
        for number, link in state.links.items():
            assert ("link", number) in state.timers
            assert all(state.requests[request].reader.link == number for request in link.ids)
            assert all(state.calls[call].link == number for call in link.calls)
        for epoch, worker in state.workers.items():
            assert worker.epoch == epoch and state.registry.slots[worker.slot].worker is worker
        for call in state.calls.values():
            queue = state.registry.models[call.model].calls
            assert call.id in state.workers[call.epoch].calls if call.epoch else call in queue
            assert call.id in state.links[call.link].calls

    def check_worker(self, worker: Worker) -> None:
        assert worker.credit() >= 0
        assert worker.credit() == 0 or worker.credit() == owed(worker)
        assert worker.credit() == 0 or worker.state is WorkerState.READY
        assert worker.reading <= worker.leases
        assert set(worker.batch_bounds) <= {run for _, run in worker.leases}
        assert len(worker.leases) <= min(worker.batch_bounds.values(), default=len(worker.leases))
        fake = self.story.workers[worker.slot]
        if worker.state in FENCED:
            assert not worker.leases and not worker.calls
        else:
            assert {(r, run.attempt) for r, run in fake.runs.items()} <= worker.leases

    def teardown(self) -> None:
        """Ends all runs and workers; checks that only tombstones remain, and that they expire.

        A tombstone is the short record of an ended request.
        """
        story = self.story
        for worker in list(story.workers.values()):
            for request in list(worker.runs):
                if worker.state is not WorkerState.LOST:
                    worker.end(request)
        for _ in range(20):  # until no model is needed
            for worker in list(story.workers.values()):
                if worker.state is not WorkerState.LOST:
                    worker.die(own=True)
            story.later(70)
        if (
            not story.core.state.admits
        ):  # calls do not delay a drain; the end of the broker answers them
            story.do(ev.Shutdown())
        story.assert_conserved()
        story.assert_idle()
        assert not story.core.state.links and not story.core.state.quarantine
        assert not story.core.state.workers
        self.check_ends()
        story.later(700)
        assert not story.core.state.tombstones
        assert not any(isinstance(key, bytes) for key in story.core.state.timers._at)

    def check_ends(self) -> None:
        """Checks that streams have ended, unless they were sent again or their client has left."""
        for (request, attempt), stream in self.story.heard.items():
            gone = stream.forgotten or stream.link in self.lost
            replaced = attempt < self.newest[request]
            assert stream.ended or gone or replaced, "a stream without its end"


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
