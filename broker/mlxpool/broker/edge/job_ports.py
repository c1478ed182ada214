"""Between the core and the job manager: what each of them sees of the other."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.broker.core import actions as core_actions
from mlxpool.broker.core.calls import MAX_IN_WORKER
from mlxpool.broker.core.core import Core
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.workers.worker_states import COMING
from mlxpool.common.errors import UnknownModel
from mlxpool.common.protocol.deltas import Deltas
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.kept.job_work import Work
from mlxpool.common.protocol.to_client import Done, Failed

# Calls of jobs for which a worker of an encoder model has places. With those that wait in the core
# (feeding.WINDOW) it has enough while answers are written; calls of clients take turns with them.
CALL_PLACES = MAX_IN_WORKER


class CoreView:
    """The port `jobs.view.PoolView`. It changes nothing. Owned by the broker's thread."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    @property
    def admits(self) -> bool:
        return self._state.admits

    @property
    def poison_life(self) -> float:
        return self._state.config.poison_life

    @property
    def ack_grace(self) -> float:
        return self._state.config.ack_grace

    def check(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        self._core.admission.check_job(owner, work, digest, now)

    def model_of(self, name: str) -> str | None:
        try:
            return self._state.registry.model(name).name
        except UnknownModel:
            return None

    def available(self, model: str, now: float) -> bool:
        known = self._state.registry.models[model]
        return known.admits and self._state.registry.unavailable(known, now) is None

    def places(self, model: str) -> int:
        known = self._state.registry.models[model]
        serving = [worker for worker in known.workers if worker.serves]
        if self._state.registry.answers_calls(model):
            return CALL_PLACES * len(serving)
        return sum(len(worker.leases) + worker.credit() for worker in serving)

    def may_answer(self, model: str) -> bool:
        return self._state.registry.may_answer_calls(model)

    def free(self, model: str) -> int:
        known = self._state.registry.models[model]
        if self._state.registry.answers_calls(model):
            serving = [worker for worker in known.workers if worker.serves]
            return sum(CALL_PLACES - len(worker.calls) for worker in serving) - len(known.calls)
        return sum(worker.room() for worker in known.workers) - len(known.queue)

    def is_outranked(self, id: bytes) -> bool:
        request = self._state.requests.get(id)
        return request is not None and self._state.model_of(request).queue.outranks(request)

    def loads_freely(self, model: str) -> bool:
        registry = self._state.registry
        known = registry.models[model]
        if any(worker.state in COMING for worker in known.workers):
            return True
        return self._core.pool.memory_used() + known.need <= registry.memory

    def link_known(self, link: int) -> bool:
        known = self._state.links.get(link)
        return known is not None and not known.lost


def job_event(
    action: core_actions.ToClient | core_actions.JobSetBack, stacks: Callable[[str], str]
) -> ev.Output | ev.RunEnded | ev.SetBack | None:
    """What the core tells the manager, None: nothing; `stacks` finds those of a slot's worker."""
    if isinstance(action, core_actions.JobSetBack):
        return ev.SetBack(
            action.id, action.attempt, action.charge, action.cause, stacks(action.slot)
        )
    message, header = action.message, action.header
    if isinstance(message, Deltas):
        return ev.Output(message.rows)
    if isinstance(message, CallAnswer):
        message = Done.of_answer(message)
    if isinstance(message, Done | Failed) and header.id is not None:
        return ev.RunEnded(header.id, header.attempt, message)
    return None
