"""The core under events in any order: what a client may rely on holds after each of them.

`Story` itself checks every frame (positions, terminals, credit); here are the laws between them.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core_harness import FakeWorker, Story, model, owed, request_id
from mlxpool.broker import events as ev
from mlxpool.broker.requests import Request
from mlxpool.broker.workers import Worker, WorkerState

IDS = [request_id(n) for n in range(1, 7)]
LINKS = (1, 2, 3)

ids = st.sampled_from(IDS)
links = st.sampled_from(LINKS)
replicas = st.integers(0, 1)


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        models = {"m": model(replicas=2, keep_alive=20.0), "other": model(keep_alive=-1)}
        self.story = Story(models, queue_limit=4, unread_bytes=2048)

    @initialize()
    def begin(self) -> None:
        self.serve(0)
        for link, request in zip(LINKS, IDS, strict=False):
            self.story.generate(request, link=link, window=link, batch=link == 2)

    def busy(self, replica: int) -> FakeWorker | None:
        """A worker with something to do, this one rather than the other."""
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
        """A first sending, or the same again, whatever became of it."""
        self.story.generate(
            request,
            link=link,
            attempt=attempt,
            batch=batch,
            window=window,
            deadline_ms=deadline,
            queue_ms=queue,
        )

    @rule(request=ids, link=links, other_owner=st.booleans())
    def duplicate(self, request: bytes, link: int, other_owner: bool) -> None:
        known = request in self.story.core.requests or request in self.story.core.tombstones
        if not known:
            return
        if other_owner:
            self.story.generate(request, link=link, attempt=9, owner="uid:2")
        else:
            self.story.generate(request, link=link, attempt=9, prompt="another")
        frame = self.story.assert_sent(link, "error", code="duplicate_id")
        assert frame.header.id is None

    @rule(request=ids, link=links, owner=st.sampled_from(["uid:1", "uid:2", None]))
    def cancel(self, request: bytes, link: int, owner: str | None) -> None:
        self.story.cancel(request, link, owner)
        if owner != "uid:2":
            assert request not in self.story.core.requests

    @rule(request=ids, more=st.integers(-1, 5))
    def ack(self, request: bytes, more: int) -> None:
        known = self.story.core.requests.get(request)
        if known is not None:
            self.story.ack(request, known.acked + more, known.link)

    @rule(link=links)
    def hear(self, link: int) -> None:
        self.story.hear(link)

    @rule(link=links)
    def lose_link(self, link: int) -> None:
        if link == 3:  # the others are heard of to the end
            self.story.do(ev.LinkLost(link))

    # ---- workers -----------------------------------------------------------------------------

    @rule(replica=replicas)
    def hello(self, replica: int) -> None:
        worker = self.pick(replica)
        if worker is not None:
            worker.hello()

    @rule(replica=replicas)
    def serve(self, replica: int) -> None:
        """The usual course, so that there is always somebody who works."""
        self.story.do(ev.Load("m"))
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
        if worker is not None:
            worker.end(min(worker.runs), outcome, count)

    @rule(replica=replicas)
    def error_end(self, replica: int) -> None:
        worker = self.busy(replica)
        if worker is not None:
            worker.fail(max(worker.runs), "out_of_memory")

    @rule(replica=replicas, reason=st.sampled_from(["crash", "load", "spawn"]))
    def exit(self, replica: int, reason: str) -> None:
        worker = self.pick(replica)
        if worker is None:
            return
        if reason == "spawn" and not worker.epoch:
            self.story.do(ev.SpawnFailed(worker.slot, "no memory"))
            return
        if reason == "load" and worker.epoch and not worker.runs:
            worker.bye("model_load_failed", "a tensor is missing")
        worker.die()

    # ---- time and operations -----------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 7.0, 13.0]))
    def tick(self, seconds: float) -> None:
        self.story.later(seconds)

    @rule(seconds=st.sampled_from([1.0, 10.0, 13.0]))
    def suspend(self, seconds: float) -> None:
        """As after a sleep of the machine: all that was due comes in one wake."""
        self.story.now += seconds
        self.story.do(ev.Wake())

    @rule(what=st.sampled_from([ev.Load("m"), ev.Unload("m")]))
    def operate(self, what: ev.Event) -> None:
        self.story.do(what)

    # ---- the laws ----------------------------------------------------------------------------

    @invariant()
    def conservation(self) -> None:
        self.story.assert_conserved()

    @invariant()
    def every_live_request_is_whole(self) -> None:
        core = self.story.core
        for request in core.requests.values():
            assert request.live
            assert request.id in core.timers._at, "a live request without a timer"
            assert request.acked <= request.sent <= request.taken
            assert request.sent + sum(chunk.count for chunk in request.unread) == request.taken
            assert request.unread_bytes == sum(chunk.size for chunk in request.unread)
            assert request.id in core.links[request.link].ids
            assert self.has_a_place(request)

    def has_a_place(self, request: Request) -> bool:
        """It waits in its queue, or the worker that has it knows."""
        queued = request in self.story.model(request.payload.model).queue
        worker = self.story.core.fleet.worker(request.worker)
        assigned = worker is not None and (request.id, request.run) in worker.places
        return queued != assigned

    @invariant()
    def books_agree(self) -> None:
        core = self.story.core
        for each in core.fleet.models.values():
            assert each.queue_bytes == sum(request.payload.size for request in each.queue)
            for worker in each.workers:
                self.check_worker(worker)
        for number, link in core.links.items():
            assert ("link", number) in core.timers._at
            assert all(core.requests[request].link == number for request in link.ids)

    def check_worker(self, worker: Worker) -> None:
        assert worker.credit() >= 0
        assert worker.credit() == 0 or worker.credit() == owed(worker)
        fake = self.story.workers[worker.slot]
        assert {(r, run.attempt) for r, run in fake.runs.items()} <= worker.places

    def teardown(self) -> None:
        """Finish everything: nothing is left but tombstones, and these not for ever."""
        story = self.story
        for worker in list(story.workers.values()):
            for request in list(worker.runs):
                if worker.state is not WorkerState.LOST:
                    worker.end(request)
            if worker.state is not WorkerState.LOST:
                worker.die()
        story.later(400)
        for each in story.workers.values():
            if each.state is not WorkerState.LOST:
                each.die()
        story.assert_conserved()
        story.assert_idle()
        assert not story.core.links
        accepted = [stream for stream in story.heard.values() if stream.ended is None]
        assert len(accepted) <= self.unfinished(), "a stream without its end"
        story.later(700)
        assert not story.core.tombstones

    def unfinished(self) -> int:
        """Streams that may lack a terminal: taken over by a later attempt, or on a lost link."""
        lost = self.story.core.counters.links_lost
        last: dict[bytes, int] = {}
        for request, attempt in self.story.heard:
            last[request] = max(attempt, last.get(request, 0))
        old = sum(attempt < last[request] for request, attempt in self.story.heard)
        return len(self.story.heard) if lost else old


TestPool = Pool.TestCase
TestPool.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
