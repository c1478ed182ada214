"""Decides which waiting jobs are run next, and how many.

For each model and priority the core has at most WINDOW times as many jobs as there are places in
ready workers: enough for every place that becomes free, and few enough that streams of the same
priority share the places with them. Where these are of few owners, each other one has an equal
share beside them, so that the core can share the places among all (requests/place_shares.py). Of
models that answer calls, such as `embed`, it has no more than there is room for answers. The store
finds the jobs, one of each owner in turn.

A suspect is a job that may have ended the broker, see `retries.ALONE_STARTS`. While the core has
one of which no id is on the disk, it gets no other job of the model and no other suspect, and it
gets a suspect only while every other job that it has has one: so the next end of the broker counts
against the suspect alone. It holds up other jobs for SUSPECT_WAIT at most: streams of a higher
priority may have all places. Then, as where it waited for so long itself, other jobs run beside it,
and the next end counts against them, too, but not further than until they are suspects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from msgspec import Struct, field

from mlxpool.broker.jobs.pool_view import PoolView
from mlxpool.broker.jobs.retries import ALONE_STARTS
from mlxpool.broker.store.operations import FeedNext
from mlxpool.broker.store.records import Fed
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.kept.job_messages import IDLE

WINDOW = 2  # times the places of ready workers
MAX_WITH_OTHERS = 4  # times as many, with those that owners have as their equal shares
FEED_BYTES = 64 * 1024 * 1024  # of requests that one operation takes
MAX_FED = 256  # jobs that one operation takes
LEAST_SHARE = 8  # places for 1 / LEAST_SHARE of the jobs that fit are free before more are read,
FEED_INTERVAL = 0.1  # or so many seconds are over: the store reads many at once for less
MAX_LEAVING = 256  # jobs of a group whose run is over and whose end is not on the disk
SUSPECTS = 1  # that one operation takes
SUSPECT_WAIT = 30.0  # seconds for which suspects wait behind all others of their model
MIN_OTHERS_TURN = 1.0  # seconds for others after a suspect that went first

Group = tuple[str, int]  # (the model's name as jobs have it, priority)


class Backlog(Struct, eq=False):
    """What is known of the jobs that wait in one group. The store has the jobs themselves."""

    due: float = math.inf  # when the earliest may be run; the past: now
    suspects_due: float = math.inf  # there may be some from then on that have to run alone
    last_owner: str = ""
    feeding: bool = False  # a FeedNext is under way
    due_since: float = math.inf  # the earliest of those that came while it is
    pause_until: float = 0.0  # the store refused to read
    active: int = 0  # jobs of it that the core has
    leaving: int = 0  # those whose run is over and whose outcome is not on the disk
    unproven: int = 0  # of both, those of which no id is on the disk since they were started
    suspects: int = 0  # of the unproven ones
    reads_suspect: bool = False  # the FeedNext under way is for one
    others_until: float = 0.0  # no suspect goes before other jobs that are due until then
    planned_at: float = -math.inf  # the last FeedNext
    suspect_at: float = -math.inf  # the last one for a suspect
    calls: tuple[str, int] = ("", 0)  # a model and how many of its calls are read at most
    owners: Counter[str] = field(default_factory=Counter)  # of the active ones
    share: int = 1  # active jobs that each owner may have, whatever others have
    others_wait: bool = False  # jobs of owners that have fewer active ones may wait

    def holds_up(self, now: float) -> bool:
        """Whether other jobs of the model wait for a suspect of this group."""
        started = self.suspects and now < self.suspect_at + SUSPECT_WAIT
        return self.reads_suspect or bool(started)

    def suspects_have_turn(self, now: float) -> bool:
        """Whether its suspects have waited for long enough, and it is not the turn of others."""
        over = now - max(self.suspects_due + SUSPECT_WAIT, self.others_until)
        return 0 <= over < math.inf and over // SUSPECT_WAIT % 2 == 0


class Feeder(Struct, eq=False):
    """Plans reads of the store; `came` and `fed` tell it what is there."""

    answer_room: AnswerRoom
    groups: dict[Group, Backlog] = field(default_factory=dict)

    def came(
        self, group: Group, due: float, owner: str | None = None, *, suspect: bool = False
    ) -> None:
        """A job waits in the group and may be run from the time `due` on.

        `owner` None: it may be anybody's. `suspect`: it has to run alone.
        """
        backlog = self.groups.setdefault(group, Backlog())
        if owner is None or backlog.owners[owner] < backlog.share:
            backlog.others_wait = True
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
                backlog.reads_suspect = bool(plan.min_starts)
                if backlog.reads_suspect:
                    backlog.suspect_at = now
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
        if any(one.holds_up(now) for one in self._of_model(name)):
            return None
        another = any(one.suspects or one.reads_suspect for one in self.groups.values())
        waited = not another and self._suspects_waited(name, now)
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
        if due and backlog.others_wait and priority != IDLE:
            most = self._call_room(model) if view.may_answer(model) else MAX_FED
            return self._plan_others(group, backlog, room, most, held, now)
        if another or due or backlog.suspects_due > now:
            return None  # of two suspects that are started one may be innocent
        if self._alone(name, view, now, waited=waited):
            return FeedNext(
                name, priority, SUSPECTS, "", frozenset(held), ALONE_STARTS, max_bytes=FEED_BYTES
            )
        return None

    def _plan_others(
        self,
        group: Group,
        backlog: Backlog,
        room: int,
        most: int,
        held: Collection[bytes],
        now: float,
    ) -> FeedNext | None:
        """A read of jobs of owners that have less than an equal share, where the core is full.

        `room`: how many it has then; `most`: how many may be read.
        """
        backlog.share = max(1, room // (len(backlog.owners) + 1))
        count = min(backlog.share, most, MAX_LEAVING - backlog.leaving)
        full = not room or backlog.active >= MAX_WITH_OTHERS * room
        if full or count <= 0 or now < backlog.planned_at + FEED_INTERVAL:
            return None
        have = frozenset(owner for owner, n in backlog.owners.items() if n >= backlog.share)
        if not have:
            return None
        name, priority = group
        return FeedNext(
            name,
            priority,
            count,
            backlog.last_owner,
            frozenset(held),
            below_starts=ALONE_STARTS,
            max_bytes=FEED_BYTES,
            but_owners=have,
        )

    def _of_model(self, name: str) -> list[Backlog]:
        return [one for (other, _), one in self.groups.items() if other == name]

    def _suspects_waited(self, name: str, now: float) -> bool:
        """Whether suspects of this model have waited for long enough.

        Nothing else of it is read then until one of them was, so that a model which always has
        other jobs does not hold them up for ever. Where that takes longer than SUSPECT_WAIT,
        because started jobs wait for a place, the others have as long, and so on.
        """
        return any(
            one.suspects_have_turn(now)
            for (other, priority), one in self.groups.items()
            if other == name and priority != IDLE
        )

    def _alone(self, name: str, view: PoolView, now: float, *, waited: bool) -> bool:
        """Whether the next end of the broker would count against a suspect of this model alone.

        One that has not `waited` for long enough also lets all others of the model go first that
        are due, jobs and streams, and waits for those of other models that are started. One that
        has is given to the core also where streams have all workers.
        """
        busy = any(
            one.unproven or one.feeding or (one.due <= now and not waited)
            for one in self._of_model(name)
        ) or (not waited and any(one.unproven or one.feeding for one in self.groups.values()))
        model = view.model_of(name)
        if model is None or busy:
            return False
        return view.free(model) > 0 or (waited and view.available(model, now))

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
        backlog.feeding = backlog.reads_suspect = False
        backlog.calls = "", 0
        if plan.min_starts:
            if not found.more:  # those that wait for a time were not looked for if one was found
                backlog.suspects_due = backlog.planned_at if found.jobs else due
        elif plan.but_owners:
            backlog.others_wait = len(found.jobs) >= plan.count
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
            backlog.feeding = backlog.reads_suspect = False
            backlog.calls = "", 0
            backlog.pause_until = again_at

    def started(self, group: Group, owner: str, *, suspect: bool = False) -> None:
        """The core has a job of the group. `suspect`: it was read as one."""
        backlog = self.groups.setdefault(group, Backlog())
        backlog.active += 1
        backlog.owners[owner] += 1
        backlog.unproven += 1
        backlog.suspects += suspect

    def proven(self, group: Group, now: float, *, suspect: bool) -> None:
        """A job has ids on the disk since it was started, or is not in the core any more."""
        backlog = self.groups[group]
        backlog.unproven -= 1
        if suspect:
            backlog.suspects -= 1
            held_up = min(SUSPECT_WAIT, now - backlog.suspect_at)
            others_until = now + max(MIN_OTHERS_TURN, held_up)
            for one in self._of_model(group[0]):  # a suspect of any priority would hold them up
                one.others_until = others_until

    def has_due(self, group: Group, now: float) -> bool:
        """Whether jobs of the group wait in the store and may be run."""
        backlog = self.groups.get(group)
        return backlog is not None and backlog.due <= now

    def leaving(self, group: Group, owner: str) -> None:
        """The run of a job is over: the core has a place for another one."""
        self._not_active(self.groups[group], owner)
        self.groups[group].leaving += 1

    def left(self, group: Group, owner: str, *, leaving: bool) -> None:
        """A job of the group is neither run nor written any more. `leaving`: it was leaving."""
        if leaving:
            self.groups[group].leaving -= 1
        else:
            self._not_active(self.groups[group], owner)
        self._drop_if_empty(group)

    def _not_active(self, backlog: Backlog, owner: str) -> None:
        backlog.active -= 1
        backlog.owners[owner] -= 1
        if not backlog.owners[owner]:
            del backlog.owners[owner]

    def _drop_if_empty(self, group: Group) -> None:
        backlog = self.groups[group]
        in_use = backlog.active or backlog.leaving or backlog.feeding
        if math.isinf(min(backlog.due, backlog.suspects_due)) and not in_use:
            del self.groups[group]


def _waits(backlog: Backlog, now: float) -> bool:
    return backlog.due <= now or backlog.suspects_due <= now


# ---- answer room ---------------------------------------------------------------------------------
# How many bytes the answers of calls may have that are computed, or wait for the disk. Pure. The
# size of an answer is known when its request was read. So a job that may be a call is read from
# the store only while there is room for the largest answer: none is begun without room, and none
# is charged with a start that it did not have.


MAX_ANSWERS = 128 * 1024 * 1024  # bytes of all models; one call more of each that has none
LARGEST = MAX_BLOB  # bytes of an answer


class AnswerRoom:
    """Counts the bytes of each model's answers."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def take(self, model: str, size: int) -> None:
        """A call is begun whose answer has at most `size` bytes; of other jobs it is 0."""
        self._bytes[model] += size

    def give_back(self, model: str, size: int) -> None:
        """An answer is on the disk, or there is none."""
        self._bytes[model] -= size

    def taken(self, model: str) -> int:
        return self._bytes[model]

    def calls(self, model: str, reads: Counter[str]) -> int:
        """How many calls of a model may be read beside those that are: `reads` of each model.

        One at least of a model that has none, so that no model waits for another one's answers.
        """
        left = MAX_ANSWERS - sum(self._bytes.values()) - LARGEST * sum(reads.values())
        least = 0 if self._bytes[model] or reads[model] else 1
        return max(least, left // LARGEST)
