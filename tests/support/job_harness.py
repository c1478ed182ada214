"""Simulations of jobs: the simulated core with a manager, and a store in memory.

The fake workers send i as the token at position i, so every id of a reader or the store can be
checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from mlxpool.broker.core import actions as core_actions
from mlxpool.broker.core.state import JOBS_LINK
from mlxpool.broker.edge.job_service import CoreView, job_event
from mlxpool.broker.jobs import actions as act
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.manager import JobManager
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.store.records import JobState, JobView
from mlxpool.common.protocol.kept import job_messages as messages
from mlxpool.common.protocol.kept.job_messages import AboutJob, Fetch, JobName, ListJobs, Submit
from mlxpool.common.protocol.kept.kept_questions import SUBMISSIONS
from mlxpool.common.protocol.to_client import StreamDelta
from mlxpool.common.protocol.token_ids import unpack_ids
from support.core_harness import BOOT, ENTROPY, OWNER, Story, request_id
from support.store_model import StoreModel
from support.stored_jobs import StoredJobs

WALL = 1_000_000.0  # wall time at the start of a simulation


@dataclass
class Reading:
    """The answers to one `fetch` message of a client, which reads a job's output."""

    start: int = 0
    accepted: dict[str, Any] | None = None
    pos: int | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: dict[str, Any] | None = None


class JobStory(Story):
    """A simulation with jobs. `settle` runs core, manager and store until no work is left."""

    def __init__(
        self,
        store: StoreModel | StoredJobs | None = None,
        policy: JobPolicy = JobPolicy(60.0, 1e9),  # noqa: B008  # frozen
        **settings: Any,
    ) -> None:
        self.offset = WALL
        self.told: list[act.Tell] = []
        self.readings: dict[tuple[bytes, int], Reading] = {}
        self.late = False  # True: commits wait until `settle`
        self.forgotten: list[int] = []  # links
        self.posts: list[act.Post] = []  # notices
        self.inbox: list[core_actions.ToClient | core_actions.JobSetBack] = []
        self.checks: list[Callable[[Reading, int], None]] = []
        super().__init__(**settings)
        self.store: Any = store or StoreModel(lambda: self.now + self.offset)
        self.store.follow(lambda: self.now + self.offset)
        self.policy = policy
        self.manager = JobManager(BOOT, CoreView(self.core), lambda: self.policy)
        self.tell_manager(ev.StoreOpened())
        self.settle()

    # ---- the plumbing ----------------------------------------------------------------------------

    def check_action(self, action: core_actions.Action) -> None:
        super().check_action(action)
        if isinstance(action, core_actions.JobSetBack) or (
            isinstance(action, core_actions.ToClient) and action.link == JOBS_LINK
        ):
            self.inbox.append(action)

    def tell_manager(self, event: ev.Event) -> None:
        self.perform(self.manager.handle(event, self.now))

    def perform(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Store):
                self.store.offer(action.operation)
            elif isinstance(action, act.Tell):
                self._told(action)
            elif isinstance(action, act.Forget):
                self.forgotten.append(action.link)
            elif isinstance(action, act.Post):
                self.posts.append(action)
            else:
                self.do(action.event)

    def drain(self) -> None:
        """Passes the core's events and the store's results to the manager."""
        while self.inbox or self.store.results:
            while self.inbox:
                event = job_event(self.inbox.pop(0), lambda slot: f"stacks of {slot}")
                if event is not None:
                    self.tell_manager(event)
            for operation, result in self.store.take():
                self.perform(self.manager.stored(operation, result, self.now))

    def settle(self) -> None:
        self.drain()
        while self.store.inbox:
            self.store.commit()
            self.drain()

    def pass_time(self, seconds: float) -> None:
        """Advances the clock and does all work that is due; connections stay alive."""
        end = self.now + seconds
        while self.now < end:
            for link in list(self.core.state.links):
                self.hear(link)
            self.later(min(0.1, end - self.now))
            if self.manager.next_wake() <= self.now:
                self.tell_manager(ev.Wake())
            self.settle()

    def restart(self) -> Self:
        """Returns a simulation of a new broker on the same store, after the old broker's death."""
        self.store.crash()
        following = type(self)(self.store, self.policy)
        following.now, following.offset = self.now, self.offset
        following.requests_made = self.requests_made
        return following

    # ---- clients ---------------------------------------------------------------------------------

    def ask(self, message: Any, link: int = 1, *, owner: str = OWNER, attempt: int = 1) -> bytes:  # type: ignore[override]
        """Sends a client's message about jobs; returns its id."""
        self.requests_made += 1
        ident = request_id(10_000 + self.requests_made)
        self.hear(link)
        submits = getattr(message, "kind", "") in SUBMISSIONS
        new_id = request_id(20_000 + self.requests_made)
        event = ev.QuestionAsked(
            link, owner, ident, attempt, message, new_id, ENTROPY, submits=submits
        )
        self.tell_manager(event)
        return ident

    def submit(self, key: str, *, owner: str = OWNER, link: int = 1, **body: Any) -> bytes:
        body = {"model": "m", "prompt": "hello", "key": key, "options": {}, **body}
        return self.ask(Submit.parse(body, ()), link, owner=owner)

    def fetch(
        self,
        key: str,
        start: int = 0,
        gen: int | None = None,
        *,
        owner: str = OWNER,
        window: int = 1024,
    ) -> Reading:
        ident = self.ask(Fetch(JobName(key), start, gen, window), owner=owner)
        return self.readings.setdefault((ident, 1), Reading(start))

    def about(self, kind: str, key: str, *, owner: str = OWNER) -> bytes:
        return self.ask(AboutJob(kind, JobName(key)), owner=owner)

    def acknowledge(self, reading: bytes, count: int, link: int = 1) -> None:
        self.tell_manager(ev.Acknowledged(link, [(reading, count)]))

    def list_jobs(self, **what: Any) -> list[dict[str, Any]]:
        ident = self.ask(ListJobs(**what))
        self.settle()
        return list(self.answer(ident)["jobs"])

    def answer(self, ident: bytes) -> dict[str, Any]:
        """Returns the body of the only answer to a message."""
        answers = [tell for tell in self.told if tell.header.id == ident]
        assert len(answers) == 1, answers
        return answers[0].message.body() or {}

    def _told(self, tell: act.Tell) -> None:
        self.told.append(tell)
        header, message = tell.header, tell.message
        reading = self.readings.setdefault((header.id or b"", header.attempt), Reading())
        if isinstance(message, messages.JobAccepted):
            assert reading.accepted is None
            reading.accepted = message.body()
        elif isinstance(message, StreamDelta):
            assert reading.accepted is not None and reading.end is None
            assert reading.pos in (None, header.pos), "a gap, or ids twice"
            ids = unpack_ids(bytes(message.ids))
            assert ids == list(range(header.pos, header.pos + len(ids)))
            job = self.store.rows[reading.accepted["job"]].job
            same = job.gen == reading.accepted["gen"]
            assert not same or header.pos + len(ids) <= job.pos, "ids that are not on the disk"
            reading.pos = header.pos + len(ids)
            reading.ids += ids
            reading.text += message.text
        elif message.kind in ("done", "error") and reading.accepted is not None:
            assert reading.end is None, "a second end"
            reading.end = message.body()

    # ---- the state ---------------------------------------------------------------------------

    def job(self, key: str, owner: str = OWNER) -> JobView:
        job: JobView = self.store.job(key, owner)
        return job

    def assert_state(self, key: str, state: JobState) -> JobView:
        job = self.job(key)
        assert job.state is state, f"{key} is {job.state}, {job.cause}"
        return job
