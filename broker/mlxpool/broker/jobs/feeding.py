"""Decides which waiting jobs run next, and how many.

The core has at most WINDOW jobs of a model and priority for each place (batch slot) of ready
workers. This fills every free place, and streams of equal priority still get their places. If few
owners have these jobs, every other owner gets an equal number of further jobs, so that the core can
divide the places among owners (requests/place_shares.py). Calls, such as `embed`, are limited by
the memory for their answers. The store finds the jobs; owners take turns.

A suspect is a job that may have ended the broker, see `retries.ALONE_STARTS`. A started job is
unproven until one of its token ids is on the disk. While the core has an unproven suspect, it gets
no other job of the model and no other suspect. It gets a suspect only while it has no other
unproven job. So only the suspect is blamed if the broker crashes next. Streams of a higher priority
may use all places, so a suspect delays other jobs for at most SUSPECT_WAIT. After that time other
jobs run beside the suspect. A crash is then blamed on these jobs too, and they become suspects
after several crashes.
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

WINDOW = 2  # jobs of a group for each batch slot of ready workers
MAX_WITH_OTHERS = 4  # active jobs at which no owner gets a further job, as a multiple of the room
FEED_BYTES = 64 * 1024 * 1024  # most bytes of requests that one operation reads
MAX_FED = 256  # most jobs that one operation reads
LEAST_SHARE = 8  # more jobs are read once 1 / LEAST_SHARE of the room is free,
FEED_INTERVAL = 0.1  # or after these seconds: one large read costs less than many small reads
MAX_LEAVING = 256  # most jobs of a group whose run has ended and whose end is not on the disk
SUSPECTS = 1  # most suspects that one operation reads
SUSPECT_WAIT = 30.0  # seconds during which all other jobs of a model go before its suspects
MIN_OTHERS_TURN = 1.0  # least seconds for other jobs after a suspect that delayed them

Group = tuple[str, int]  # (the model's name in the jobs, priority)


class Backlog(Struct, eq=False):
    """The state of a group of jobs, which are the jobs of one model and priority.

    It has the times at which the group's jobs are due, and the numbers of its jobs in the core.
    """

    due: float = math.inf  # earliest time at which a job may run; a time in the past: now
    suspects_due: float = math.inf  # earliest time at which a suspect may run alone
    last_owner: str = ""
    feeding: bool = False  # a FeedNext is under way
    due_since: float = math.inf  # the earliest `due` of jobs that came during the FeedNext
    pause_until: float = 0.0  # no read before this time: the store refused a read
    active: int = 0  # number of the group's jobs that the core has
    leaving: int = 0  # jobs whose run is over and whose outcome is not on the disk
    unproven: int = 0  # active and leaving jobs without an id on the disk since their start
    suspects: int = 0  # unproven jobs that are suspects
    reads_suspect: bool = False  # the FeedNext under way is for a suspect
    others_until: float = 0.0  # other due jobs go before suspects until this time
    planned_at: float = -math.inf  # time of the last FeedNext
    suspect_at: float = -math.inf  # time of the last FeedNext for a suspect
    calls: tuple[str, int] = ("", 0)  # (model, most calls that the FeedNext reads)
    owners: Counter[str] = field(default_factory=Counter)  # active jobs by owner
    share: int = 1  # active jobs that each owner may have, even if the core is full
    others_wait: bool = False  # owners with fewer than `share` active jobs may have waiting jobs

    def holds_up(self, now: float) -> bool:
        """Returns whether other jobs of the model wait for a suspect of this group."""
        started = self.suspects and now < self.suspect_at + SUSPECT_WAIT
        return self.reads_suspect or bool(started)

    def suspects_have_turn(self, now: float) -> bool:
        """Returns whether the group's suspects have waited long enough to go before other jobs."""
        over = now - max(self.suspects_due + SUSPECT_WAIT, self.others_until)
        return 0 <= over < math.inf and over // SUSPECT_WAIT % 2 == 0


class Feeder(Struct, eq=False):
    """Plans reads of the store. Calls of `came` and `fed` tell it which jobs wait in the store."""

    answer_room: AnswerRoom
    groups: dict[Group, Backlog] = field(default_factory=dict)

    def came(
        self, group: Group, due: float, owner: str | None = None, *, suspect: bool = False
    ) -> None:
        """Records that a job waits in the group and may run from the time `due` on.

        `owner` is None if the owner is unknown. `suspect`: the job may have ended the broker, so it
        has to run alone.
        """
        backlog = self.groups.setdefault(group, Backlog())
        if owner is None or backlog.owners[owner] < backlog.share:
            backlog.others_wait = True
        backlog.due = min(backlog.due, due)
        backlog.due_since = min(backlog.due_since, due)
        if suspect:
            backlog.suspects_due = min(backlog.suspects_due, due)

    def next_due(self, now: float) -> float:
        """Returns the next time at which a job becomes due; infinity if none is known."""
        times = (
            time for backlog in self.groups.values() for time in (backlog.due, backlog.suspects_due)
        )
        return min((time for time in times if time > now), default=math.inf)

    def hungry(self, now: float) -> set[str]:
        """Returns the names of models with jobs that are due."""
        return {name for (name, _), backlog in self.groups.items() if _waits(backlog, now)}

    def plan(self, view: PoolView, held: Collection[bytes], now: float) -> list[FeedNext]:
        """Returns the reads to make now, and marks their groups as being read.

        Models with the fewest bytes of answers come first, so that models share the room for
        answers. Within a model, groups of a higher priority come first.
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
        """Returns the number of calls of a model that may be read now."""
        reads: Counter[str] = Counter()
        for backlog in self.groups.values():
            reads[backlog.calls[0]] += backlog.calls[1]
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
        if any(other.holds_up(now) for other in self._of_model(name)):
            return None
        another = any(other.suspects or other.reads_suspect for other in self.groups.values())
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
            return None  # if two suspects start together, one of them may be innocent
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
        """Plans a read of jobs of owners that have less than an equal share of the core's jobs.

        These owners get jobs even while the jobs of other owners fill the core. `room`: the number
        of jobs that fill the core. `most`: the most jobs to read.
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
        return [backlog for (other, _), backlog in self.groups.items() if other == name]

    def _suspects_waited(self, name: str, now: float) -> bool:
        """Returns whether suspects of this model have waited long enough to go before other jobs.

        Without this rule a model that always has other jobs would never run its suspects. If
        started jobs wait longer than SUSPECT_WAIT for a place, other jobs and suspects alternate in
        periods of that length.
        """
        return any(
            backlog.suspects_have_turn(now)
            for (other, priority), backlog in self.groups.items()
            if other == name and priority != IDLE
        )

    def _alone(self, name: str, view: PoolView, now: float, *, waited: bool) -> bool:
        """Returns whether the core may get a suspect now, so that a crash is blamed on the suspect.

        `waited`: the suspect has waited long enough. Until then all due jobs and streams of the
        model go first, and the suspect waits for started jobs of other models. Afterwards the core
        gets the suspect even if streams use all workers.
        """
        busy = any(
            backlog.unproven or backlog.feeding or (backlog.due <= now and not waited)
            for backlog in self._of_model(name)
        ) or (
            not waited
            and any(backlog.unproven or backlog.feeding for backlog in self.groups.values())
        )
        model = view.model_of(name)
        if model is None or busy:
            return False
        return view.free(model) > 0 or (waited and view.available(model, now))

    def _room(self, model: str, name: str, priority: int, view: PoolView, now: float) -> int:
        """Returns the number of jobs of this priority that the core may have at the same time."""
        if not view.available(model, now):
            return 0
        if priority != IDLE:
            return WINDOW * view.places(model)
        others = any(
            backlog.due <= now
            for (other, of), backlog in self.groups.items()
            if other == name and of > IDLE
        )
        active = self.groups[(name, priority)].active
        return 0 if others else active + max(0, view.free(model))

    def fed(self, plan: FeedNext, result: Fed, due: float) -> None:
        """Handles the result of a read.

        `due`: the earliest time, on the broker's clock, at which a waiting job may run.
        """
        group = (plan.model, plan.priority)
        backlog = self.groups.get(group)
        if backlog is None:
            return  # the store was lost meanwhile
        backlog.feeding = backlog.reads_suspect = False
        backlog.calls = "", 0
        if plan.min_starts:
            if not result.more:
                # A read that returns jobs does not search for later due times: `due` is unknown.
                backlog.suspects_due = backlog.planned_at if result.jobs else due
        elif plan.but_owners:
            backlog.others_wait = len(result.jobs) >= plan.count
        else:
            backlog.last_owner = result.last_owner
            size = sum(len(fed.request) + sum(map(len, fed.blobs)) for fed in result.jobs)
            if len(result.jobs) < plan.count and size < plan.max_bytes // 2:
                backlog.due = due
        backlog.due = min(backlog.due, backlog.due_since)
        self._drop_if_empty(group)

    def refused(self, plan: FeedNext, again_at: float) -> None:
        """Pauses the reads of a group until `again_at`: the store refused a read."""
        backlog = self.groups.get((plan.model, plan.priority))
        if backlog is not None:
            backlog.feeding = backlog.reads_suspect = False
            backlog.calls = "", 0
            backlog.pause_until = again_at

    def started(self, group: Group, owner: str, *, suspect: bool = False) -> None:
        """Counts a job that the core now has. `suspect`: the job was read as a suspect."""
        backlog = self.groups.setdefault(group, Backlog())
        backlog.active += 1
        backlog.owners[owner] += 1
        backlog.unproven += 1
        backlog.suspects += suspect

    def proven(self, group: Group, now: float, *, suspect: bool) -> None:
        """Counts a job as proven: its run has put ids on the disk, or it has left the core."""
        backlog = self.groups[group]
        backlog.unproven -= 1
        if suspect:
            backlog.suspects -= 1
            held_up = min(SUSPECT_WAIT, now - backlog.suspect_at)
            others_until = now + max(MIN_OTHERS_TURN, held_up)
            for other in self._of_model(group[0]):  # a suspect of any priority delays all
                other.others_until = others_until

    def has_due(self, group: Group, now: float) -> bool:
        """Returns whether jobs of the group wait in the store and may be run."""
        backlog = self.groups.get(group)
        return backlog is not None and backlog.due <= now

    def leaving(self, group: Group, owner: str) -> None:
        """Counts the end of a job's run: the core has room for another job."""
        self._not_active(self.groups[group], owner)
        self.groups[group].leaving += 1

    def left(self, group: Group, owner: str, *, leaving: bool) -> None:
        """Counts a job as no longer active: its outcome is on the disk, or the job was dropped.

        `leaving`: whether the method `leaving` was called for the job before.
        """
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
# Limits the bytes of answers that are computed or wait for the disk. The size of an answer is
# known once its request is read. So a job that may be a call is read from the store only while
# there is room for the largest answer: no job is begun without room, and no job is charged with a
# start that it did not have.


# Bytes of the answers of all models. A model without answers may exceed this bound by one call.
MAX_ANSWERS = 128 * 1024 * 1024
LARGEST = MAX_BLOB  # most bytes of an answer


class AnswerRoom:
    """Counts the reserved bytes of each model's answers."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def take(self, model: str, size: int) -> None:
        """Reserves `size` bytes for the answer of a job.

        `size` is the most bytes that the answer can have; it is 0 if the job is not a call.
        """
        self._bytes[model] += size

    def give_back(self, model: str, size: int) -> None:
        """Frees `size` bytes: the answer is on the disk, or no answer will come."""
        self._bytes[model] -= size

    def taken(self, model: str) -> int:
        return self._bytes[model]

    def calls(self, model: str, reads: Counter[str]) -> int:
        """Returns the number of calls of a model that may be read now.

        `reads`: the number of calls that are being read, by model. A model without calls may always
        read one, so that it never waits for another model's answers.
        """
        left = MAX_ANSWERS - sum(self._bytes.values()) - LARGEST * sum(reads.values())
        least = 0 if self._bytes[model] or reads[model] else 1
        return max(least, left // LARGEST)
