"""The runs of this worker: one attempt of a request each, from its `work` to its end.

A run is prepared by the preparer, then computed by the compute thread. It ends with its last delta,
is handed back by `yield`, or is dropped with the connection that brought it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum, auto

from msgspec import Struct

from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol.deltas import Delta, RunEnd
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.from_worker import Credit, PromptSizes, Yield
from mlxpool.common.protocol.to_worker import Work, count_of_resume
from mlxpool.common.trace import History
from mlxpool.worker.compute.messages import Drop, DropAll, HandBack, Inbound, RunKey
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.preparations import Prepared
from mlxpool.worker.process.prepare import Preparer
from mlxpool.worker.process.prepare_inputs import InputPreparer

log = logging.getLogger("mlxpool.worker")


class RunState(Enum):
    """PREPARING → COMPUTING, or PREPARING → CANCELLED until the preparer is done with it."""

    PREPARING = auto()
    CANCELLED = auto()
    COMPUTING = auto()


class LiveRun(Struct):
    """A run that was received and has not ended. `position`: the index of its first new id."""

    position: int
    state: RunState = RunState.PREPARING


class Runs:
    """A table of live runs and the credit that follows from it. Belongs to the main thread."""

    def __init__(self, link: Link, compute: Callable[[Inbound], None], history: History) -> None:
        """`compute` sends a message to the compute thread."""
        self._link = link
        self._compute = compute
        self._history = history
        # There is one before the first `credit`.
        self._preparer: Preparer | InputPreparer | None = None
        self.fence = 0  # counts dropped connections; results for an older one are not sent
        self._capacity = 0  # runs at once; 0 until the model is loaded
        self._works = 0  # `work` frames of this epoch
        self._draining = False
        self.live: dict[RunKey, LiveRun] = {}

    @property
    def preparing(self) -> int:
        """How many runs the preparer still has."""
        return sum(run.state is not RunState.COMPUTING for run in self.live.values())

    def opened(self, preparer: Preparer | InputPreparer) -> None:
        """The model's text functions are there."""
        self._preparer = preparer

    def loaded(self, capacity: int) -> None:
        """The model is ready for so many runs at once."""
        self._capacity = capacity
        self._send_credit()

    # ---- from the broker -----------------------------------------------------------------------

    def new_epoch(self) -> None:
        """The broker has welcomed this worker with a new epoch."""
        self.drop_all()
        self._works = 0
        if self._capacity:
            self._send_credit()

    def drop_all(self) -> None:
        """Forget all runs: the broker has given them to another worker, or will do so."""
        self.fence += 1
        self.live.clear()
        if self._preparer is not None:
            self._preparer.drop_all()
        self._compute(DropAll(self.fence))

    def work(self, message: Message, key: RunKey) -> None:
        """Take a `work`; a message that cannot be handled ends its own run only."""
        self._works += 1
        position = count_of_resume(message.body)
        if self._history.on:
            self._history.write("work", id=key[0], attempt=key[1], count=position)
        if self._draining:
            self._yield([key])
            return
        self.live[key] = LiveRun(position)
        assert self._preparer is not None, "the broker sends work after the first credit only"
        try:
            self._preparer.prepare(key, Work.parse(message.body, message.blobs), self.fence)
        except PoolError as error:
            self._end(key, error)
        except Exception as error:
            log.exception("a message failed", extra={"kind": message.kind})
            self._end(key, Internal(f"the request could not be read: {error!r}"))

    def cancel(self, key: RunKey) -> None:
        run = self.live.get(key)
        if run is None:
            return
        if run.state is RunState.COMPUTING:
            self._compute(Drop(key))
        else:
            run.state = RunState.CANCELLED
            assert self._preparer is not None
            self._preparer.cancel(key)

    def drain(self) -> None:
        """Stop all runs and take no more; `handed_back` follows from the compute thread."""
        if not self._draining:
            self._draining = True
            self._compute(HandBack())

    # ---- from the other threads ----------------------------------------------------------------

    def prepared(self, prepared: Prepared) -> None:
        """The preparer is done with a run, which is ignored if it is not live any more."""
        key, run = prepared.key, self.live.get(prepared.key)
        if run is None:
            return
        cancelled, run.state = run.state is RunState.CANCELLED, RunState.COMPUTING
        if cancelled:
            self._end(key, _CANCELLED)
        elif prepared.error is not None:
            self._end(key, prepared.error)
        elif prepared.admit is not None and not self._draining:
            self._link.send(PromptSizes([(*key, len(prepared.admit.sequence.prompt))]))
            self._compute(prepared.admit)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Send the deltas of one step, as far as their runs are live."""
        live = self.live
        self._deliver([one for one in deltas if one[:2] in live])

    def handed_back(self) -> None:
        """The compute thread has stopped all runs, and all deltas that it made were delivered."""
        for key in [k for k, run in self.live.items() if run.state is RunState.CANCELLED]:
            self._end(key, _CANCELLED)
        for key in [k for k, run in self.live.items() if run.state is RunState.PREPARING]:
            assert self._preparer is not None
            self._preparer.cancel(key)  # calls of the tokenizer are answered before the end
        self._yield(sorted(self.live))
        self.live.clear()

    # ---- to the broker -------------------------------------------------------------------------

    def _end(self, key: RunKey, end: RunEnd | PoolError) -> None:
        """End a run that never reached the compute thread."""
        self._deliver([Delta(*key, self.live[key].position, "", b"", end=end.body())])

    def _deliver(self, deltas: list[Delta]) -> None:
        ended = [one[:2] for one in deltas if one.end is not None]
        for key in ended:
            self.live.pop(key, None)
        if deltas:
            self._link.send_deltas(deltas)
        if ended:
            self._send_credit()

    def _yield(self, keys: list[RunKey]) -> None:
        if keys:
            self._link.send(Yield(keys))
            for id, attempt in keys:
                self._history.write("yield", id=id, attempt=attempt)
        self._send_credit()

    def _send_credit(self) -> None:
        free = 0 if self._draining else max(0, self._capacity - len(self.live))
        self._link.send(Credit(free, self._works))


_CANCELLED = RunEnd("cancelled")
