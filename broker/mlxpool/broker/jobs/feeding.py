"""Decides which waiting jobs are run next, and how many.

For each model and priority the core has at most WINDOW times as many jobs as there are places in
ready workers: enough for every place that becomes free, and few enough that streams of the same
priority share the places with them. Of models that answer calls, such as `embed`, it has no more
than there is room for answers. The store finds the jobs, one of each owner in turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from mlxpool.broker.jobs.answer_room import AnswerRoom
from mlxpool.broker.jobs.pool_view import PoolView
from mlxpool.broker.jobs.retries import ALONE_STARTS
from mlxpool.broker.store.operations import FeedNext
from mlxpool.broker.store.records import Fed
from mlxpool.common.protocol.kept.job_messages import IDLE

WINDOW = 2  # times the places of ready workers
FEED_BYTES = 64 * 1024 * 1024  # of requests that one operation takes
MAX_FED = 256  # jobs that one operation takes
LEAST_SHARE = 8  # places for 1 / LEAST_SHARE of the jobs that fit are free before more are read,
FEED_INTERVAL = 0.1  # or so many seconds are over: the store reads many at once for less
MAX_LEAVING = 256  # jobs of a group whose run is over and whose end is not on the disk
SUSPECTS = 1  # jobs that may have ended the broker run one at a time
SUSPECT_WAIT = (
    30.0  # seconds for which they wait behind all others of their model, then one goes first
)

Group = tuple[str, int]  # (the model's name as jobs have it, priority)


@dataclass(eq=False, slots=True)
class Backlog:
    """What is known of the jobs that wait in one group. The store has the jobs themselves."""

    due: float = math.inf  # when the earliest may be run; the past: now
    suspects_due: float = math.inf  # there may be some from then on that have to run alone
    last_owner: str = ""
    feeding: bool = False  # a FeedNext is under way
    due_since: float = math.inf  # the earliest of those that came while it is
    pause_until: float = 0.0  # the store refused to read
    active: int = 0  # jobs of it that the core has
    leaving: int = 0  # those whose run is over and whose outcome is not on the disk
    planned_at: float = -math.inf  # the last FeedNext
    calls: tuple[str, int] = ("", 0)  # a model and how many of its calls are read at most


@dataclass(eq=False, slots=True)
class Feeder:
    """Plans reads of the store; `came` and `fed` tell it what is there."""

    answer_room: AnswerRoom
    groups: dict[Group, Backlog] = field(default_factory=dict)

    def came(self, group: Group, due: float, *, suspect: bool = False) -> None:
        """A job waits in the group and may be run from the time `due` on.

        `suspect`: it has to run alone.
        """
        backlog = self.groups.setdefault(group, Backlog())
        backlog.due = min(backlog.due, due)
        backlog.due_since = min(backlog.due_since, due)
        if suspect:
            backlog.suspects_due = min(backlog.suspects_due, due)

    def next_due(self, now: float) -> float:
        """When a job becomes due that is not; infinity: none is known of."""
        times = (time for one in self.groups.values() for time in (one.due, one.suspects_due))
        return min((time for time in times if time > now), default=math.inf)

    def hungry(self, now: float) -> set[str]:
        """The names of models for which jobs are due."""
        return {name for (name, _), one in self.groups.items() if _waits(one, now)}

    def plan(self, view: PoolView, held: Collection[bytes], now: float) -> list[FeedNext]:
        """What to read now. Marks it as being read.

        Of each model groups of a higher priority come first, and models with the least answers, so
        that the room for answers is shared.
        """
        plans = []
        for group in sorted(self.groups, key=lambda group: self._order(group, view)):
            backlog = self.groups[group]
            plan = self._plan(group, backlog, view, held, now)
            if plan is not None:
                backlog.feeding, backlog.due_since = True, math.inf
                backlog.planned_at = now
                model = view.model_of(plan.model)
                if model is not None and view.may_answer(model):
                    backlog.calls = model, plan.count
                plans.append(plan)
        return plans

    def _order(self, group: Group, view: PoolView) -> tuple[int, int]:
        name, priority = group
        return self.answer_room.taken(view.model_of(name) or name), -priority

    def _call_room(self, model: str) -> int:
        """How many calls of a model may be read now."""
        reads: Counter[str] = Counter()
        for one in self.groups.values():
            reads[one.calls[0]] += one.calls[1]
        return self.answer_room.calls(model, reads)

    def _plan(
        self, group: Group, backlog: Backlog, view: PoolView, held: Collection[bytes], now: float
    ) -> FeedNext | None:
        name, priority = group
        model = view.model_of(name)
        if backlog.feeding or now < backlog.pause_until or not _waits(backlog, now):
            return None
        if model is None or not view.admits:
            return None
        room = self._room(model, name, priority, view, now)
        count = min(room - backlog.active, MAX_LEAVING - backlog.leaving)
        if priority != IDLE and now < backlog.planned_at + FEED_INTERVAL:
            count = 0 if count * LEAST_SHARE < room else count
        if count > 0 and view.may_answer(model):
            count = min(count, self._call_room(model))
        waited = self._suspects_waited(name, now)
        due = backlog.due <= now and not waited
        if due and count > 0:
            return FeedNext(
                name,
                priority,
                min(count, MAX_FED),
                backlog.last_owner,
                frozenset(held),
                below_starts=ALONE_STARTS,
                max_bytes=FEED_BYTES,
            )
        if backlog.suspects_due <= now and not due and self._alone(name, view, now, waited=waited):
            return FeedNext(
                name, priority, SUSPECTS, "", frozenset(held), ALONE_STARTS, max_bytes=FEED_BYTES
            )
        return None

    def _suspects_waited(self, name: str, now: float) -> bool:
        """Whether jobs of this model that have to run alone have waited for long enough.

        Nothing else of it is read then until one of them was, so that a model which always has
        other jobs does not hold them up for ever.
        """
        return any(
            one.suspects_due + SUSPECT_WAIT <= now
            for (other, priority), one in self.groups.items()
            if other == name and priority != IDLE
        )

    def _alone(self, name: str, view: PoolView, now: float, *, waited: bool) -> bool:
        """Whether a job of this model would run alone: no other of it runs, is read or is due.

        One that has `waited` for long enough goes before those that are due, and is given to the
        core also where streams have all workers.
        """
        of_model = [one for (other, _), one in self.groups.items() if other == name]
        model = view.model_of(name)
        busy = any(
            one.active or one.leaving or one.feeding or (one.due <= now and not waited)
            for one in of_model
        )
        if model is None or busy:
            return False
        return view.idle(model) or (waited and view.available(model, now))

    def _room(self, model: str, name: str, priority: int, view: PoolView, now: float) -> int:
        """How many jobs of this priority the core may have."""
        if not view.available(model, now):
            return 0
        if priority != IDLE:
            return WINDOW * view.places(model)
        others = any(
            one.due <= now
            for (other, of), one in self.groups.items()
            if other == name and of > IDLE
        )
        active = self.groups[(name, priority)].active
        return 0 if others else active + max(0, view.free(model))

    def fed(self, plan: FeedNext, found: Fed, due: float) -> None:
        """A read has ended. `due`: when the earliest of those that wait for a time is, see now."""
        group = (plan.model, plan.priority)
        backlog = self.groups.get(group)
        if backlog is None:
            return  # the store was lost meanwhile
        backlog.feeding, backlog.calls = False, ("", 0)
        if plan.min_starts:
            backlog.suspects_due = backlog.planned_at if found.jobs else due
        else:
            backlog.last_owner = found.last_owner
            size = sum(len(fed.request) + sum(map(len, fed.blobs)) for fed in found.jobs)
            if len(found.jobs) < plan.count and size < plan.max_bytes // 2:
                backlog.due = due
        backlog.due = min(backlog.due, backlog.due_since)
        self._drop_if_empty(group)

    def refused(self, plan: FeedNext, again_at: float) -> None:
        """The store could not read now."""
        backlog = self.groups.get((plan.model, plan.priority))
        if backlog is not None:
            backlog.feeding, backlog.calls = False, ("", 0)
            backlog.pause_until = again_at

    def started(self, group: Group) -> None:
        self.groups.setdefault(group, Backlog()).active += 1

    def has_due(self, group: Group, now: float) -> bool:
        """Whether jobs of the group wait in the store and may be run."""
        backlog = self.groups.get(group)
        return backlog is not None and backlog.due <= now

    def leaving(self, group: Group) -> None:
        """The run of a job is over: the core has a place for another one."""
        self.groups[group].active -= 1
        self.groups[group].leaving += 1

    def left(self, group: Group, *, leaving: bool) -> None:
        """A job of the group is neither run nor written any more. `leaving`: it was leaving."""
        if leaving:
            self.groups[group].leaving -= 1
        else:
            self.groups[group].active -= 1
        self._drop_if_empty(group)

    def _drop_if_empty(self, group: Group) -> None:
        backlog = self.groups[group]
        in_use = backlog.active or backlog.leaving or backlog.feeding
        if math.isinf(min(backlog.due, backlog.suspects_due)) and not in_use:
            del self.groups[group]


def _waits(backlog: Backlog, now: float) -> bool:
    return backlog.due <= now or backlog.suspects_due <= now
