"""The requests of this worker: a table of its runs and calls, from arrival to end.

A run is one attempt of a request. It ends with its last delta, is handed back by `yield`, or is
dropped with its connection. A call is a request without a stream, for the tokenizer or for the
model. It ends with its answer or its cancellation, or is dropped like a run.

Each run or call is prepared first: the service of worker/preparation performs a job. The service's
thread applies the job's result to the request (see `Preparation.finish`). If the answer has a
format, the thread of `Formats` does this. Then the compute thread computes the request.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.answer_format import text_of
from mlxpool.common.errors import BadRequest, Internal, PoolError, TooLarge
from mlxpool.common.gpus import visible_gpus
from mlxpool.common.protocol.decisions import DECIDE, DecideCall
from mlxpool.common.protocol.deltas import Delta, RunEnd
from mlxpool.common.protocol.encoder_calls import TASKS, EncoderCall
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.from_worker import CallAnswer, Credit, PromptSizes, Yield
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize, Work, count_of_resume
from mlxpool.common.trace import History
from mlxpool.worker.compute.messages import (
    Admit,
    Answer,
    CallKey,
    Compute,
    Drop,
    DropAll,
    DropCall,
    HandBack,
    Inbound,
    RunKey,
)
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.preparation.jobs import ENCODES, GENERATES, CheckFormat, Encoded, Result
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.preparation.service import Load, MakeService, Service
from mlxpool.worker.process.calls import (
    prepare_decide,
    prepare_detokenize,
    prepare_encode,
    prepare_tokenize,
)
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.prompts import Arrival, Outcome, Preparation, prepare_run
from mlxpool.worker.prompt.text_model import Opened

if TYPE_CHECKING:
    from mlxpool.worker.process.formats import Formats

log = logging.getLogger("mlxpool.worker")

Request = Work | Tokenize | Detokenize | DecideCall | EncoderCall
Begin = Callable[[Any, Any, Any, Arrival], Preparation | Compute]
Finish = Callable[[Result], None]  # called with a job's result

PARSE: Mapping[str, Callable[[Mapping[str, Any], Sequence[bytes]], Request]] = {
    Work.kind: Work.parse,
    Tokenize.kind: Tokenize.parse,
    Detokenize.kind: Detokenize.parse,
    DECIDE: DecideCall.parse,
    **{task: partial(EncoderCall.parse, task) for task in TASKS},
}
OF_TOKENIZERS: Mapping[type[Request], Begin] = {
    Tokenize: prepare_tokenize,
    Detokenize: prepare_detokenize,
}
OF_GENERATORS: Mapping[type[Request], Begin] = {
    **OF_TOKENIZERS,
    Work: prepare_run,
    DecideCall: prepare_decide,
}
OF_ENCODERS: Mapping[type[Request], Begin] = {**OF_TOKENIZERS, EncoderCall: prepare_encode}


class State(Enum):
    """The state of a task: PREPARING → COMPUTING; a run cancelled in preparation: → CANCELLED."""

    PREPARING = auto()
    CANCELLED = auto()
    COMPUTING = auto()


class Task(Struct, eq=False):
    """A run or call in progress.

    `name`: the task's name at the broker: (id, number of the run), or (id, 0) for a call. `key`:
    the task's key in messages to and from the compute thread. `position`: the index of the first
    new id of a run.
    """

    name: RunKey
    key: RunKey | CallKey
    position: int = 0
    state: State = State.PREPARING
    # The function for the job's result. It is set before the job is submitted. It is cleared when
    # the task is dropped or the service's thread has the result, so that the prompt is freed.
    finish: Finish | None = None


class Prepared(Struct, frozen=True):
    """A task with the outcome of its preparation: the next message, the answer or an error."""

    task: Task
    outcome: Outcome | PoolError


class Intake:
    """The table of tasks (runs and calls), used by the main thread.

    It sends the credit: the number of runs that the broker may still give to this worker.
    """

    def __init__(
        self,
        link: Link,
        compute: Callable[[Inbound], None],
        post: Callable[[Prepared], None],
        history: History,
        make_service: MakeService,
    ) -> None:
        """`compute` sends messages to the compute thread, `post` to the main thread."""
        self._link = link
        self._compute = compute
        self._post = post
        self._history = history
        self._make_service = make_service
        self._opened: Opened | OpenedEncoder | None = None
        self._service: Service | None = None  # set before the first `credit`
        self._formats: Formats | None = None
        self.fence = 0  # counts dropped connections; deltas of an older count are not sent
        self._capacity = 0  # the most concurrent runs; 0 until the model is loaded
        self._works = 0  # `work` frames of this epoch
        self._draining = False
        self._numbers = count()  # counts calls: a later call may reuse the id of a cancelled call
        self.tasks: dict[RunKey, Task] = {}  # tasks by name

    def runs(self) -> list[Task]:
        """Returns the runs that have not ended."""
        return [task for (_, number), task in self.tasks.items() if number]

    # ---- the model -----------------------------------------------------------------------------

    def opened(self, opened: Opened | OpenedEncoder) -> None:
        """Starts the service that prepares requests, after the model was checked."""
        self._opened = opened
        self._service = self._make_service(opened, self._deliver_result)
        self._service.start()
        if isinstance(opened, Opened) and opened.source is not None and not opened.no_format:
            # This imports llguidance; encoders and the counting model do not need it.
            from mlxpool.worker.process.formats import Formats

            self._formats = Formats(opened)
            # Loads now, because no stream runs yet. Not without a GPU: there the load may take as
            # long as the rest of the start.
            if sys.platform == "darwin" or visible_gpus(os.environ):
                self._formats.load()

    def is_ready(self, again: Callable[[], None]) -> bool:
        """Returns whether requests can be prepared; if not, calls `again` as soon as they can."""
        return self._formats is None or self._formats.is_settled(again)

    def rest(self) -> None:
        """Loads the vocabulary while no request runs, because a request with a format needs it."""
        if self._formats is not None:
            self._formats.load()

    def loaded(self, capacity: int) -> None:
        """Records that the model is ready for `capacity` concurrent runs."""
        self._capacity = capacity
        self._send_credit()

    @property
    def load(self) -> Load:
        """The load of the preparation service."""
        return Load() if self._service is None else self._service.load

    @property
    def preparing(self) -> int:
        """The number of runs that do not compute yet."""
        return sum(run.state is not State.COMPUTING for run in self.runs())

    # ---- from the broker -----------------------------------------------------------------------

    def new_epoch(self) -> None:
        """Begins a new epoch after the broker's `welcome`."""
        self.drop_all()
        self._works = 0
        if self._capacity:
            self._send_credit()

    def drop_all(self) -> None:
        """Forgets all tasks: the broker gives them to other workers."""
        # The fence rises before DropAll is sent: the deltas that the compute thread posts until it
        # handles DropAll have an older fence than the deltas of later runs.
        self.fence += 1
        for task in self.tasks.values():
            task.finish = None
        self.tasks.clear()
        if self._service is not None:
            self._service.cancel_all()
        self._compute(DropAll(self.fence))

    def begin(self, message: Message) -> None:
        """Accepts a request; an error in the message ends only this request."""
        task = self._run(message) if message.kind == Work.kind else self._call(message)
        if task is None:
            return
        self.tasks[task.name] = task
        try:
            self.prepare(task, PARSE[message.kind](message.body, message.blobs))
        except PoolError as error:
            self._end(task, error)
        except Exception as error:
            log.exception("a message failed", extra={"kind": message.kind})
            self._end(task, Internal(f"the request could not be read: {error!r}"))

    def _run(self, message: Message) -> Task | None:
        """Returns the run of a `work`; None while draining."""
        key = (message.header.id or b"", message.header.attempt)
        position = count_of_resume(message.body)
        self._works += 1
        if self._history.on:
            self._history.write("work", id=key[0], attempt=key[1], count=position)
        if self._draining:
            self._yield([key])
            return None
        assert self._service is not None, "the broker sends work after the first credit only"
        return Task(key, key, position)

    def _call(self, message: Message) -> Task | None:
        """Returns the call of a message; None before the model was opened."""
        if self._service is None:
            return None
        id = message.header.id or b""
        return Task((id, 0), CallKey(id, next(self._numbers)))

    def cancel(self, name: RunKey) -> None:
        """Stops a task. A run then gets a last delta, a call gets no answer."""
        task = self.tasks.get(name)
        if task is None:
            return
        key = task.key
        if isinstance(key, CallKey):
            del self.tasks[name]
            task.finish = None
        if task.state is State.COMPUTING:
            self._compute(DropCall(key) if isinstance(key, CallKey) else Drop(key))
        else:
            # A run stays in the table and uses a credit until its preparation has ended.
            task.state = State.CANCELLED
            assert self._service is not None
            self._service.cancel(task)

    def drain(self) -> None:
        """Stops all runs and refuses new runs.

        The compute thread answers with HandedBack, see `handed_back`.
        """
        if not self._draining:
            self._draining = True
            self._compute(HandBack())

    # ---- from the other threads ----------------------------------------------------------------

    def prepared(self, prepared: Prepared) -> None:
        """Handles the end of a preparation; ignores a task that has left the table."""
        task, outcome = prepared.task, prepared.outcome
        if self.tasks.get(task.name) is not task:
            return
        cancelled, task.state = task.state is State.CANCELLED, State.COMPUTING
        if cancelled:
            self._end(task, _CANCELLED)
        elif isinstance(outcome, PoolError):
            self._end(task, outcome)
        elif isinstance(outcome, CallAnswer):
            self._answer(task, outcome)
        elif not isinstance(outcome, Admit):
            self._compute(outcome)
        elif not self._draining:
            self._link.send(PromptSizes([(*task.name, len(outcome.sequence.prompt))]))
            self._compute(outcome)

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Sends the deltas of one step, if their runs have not ended."""
        tasks = self.tasks
        self._deliver([delta for delta in deltas if delta[:2] in tasks])

    def answered(self, answer: Answer) -> None:
        """Handles the compute thread's answer to a call; ignores a cancelled call."""
        task = self.tasks.get((answer.key.id, 0))
        if task is not None and task.key == answer.key:
            self._answer(task, answer.content)

    def handed_back(self) -> None:
        """Hands back all runs, after the compute thread has stopped them and sent their deltas."""
        # The order matters: a cancelled run ends as cancelled, and no other worker runs it again.
        runs = self.runs()
        for run in [run for run in runs if run.state is State.CANCELLED]:
            self._end(run, _CANCELLED)
        for run in [run for run in runs if run.state is State.PREPARING]:
            assert self._service is not None
            self._service.cancel(run)  # runs only: calls are still answered before the end
        left = sorted(run.name for run in self.runs())
        for name in left:
            del self.tasks[name]
        self._yield(left)

    # ---- preparation ---------------------------------------------------------------------------

    def prepare(self, task: Task, request: Request) -> None:
        """Begins a preparation. Raises PoolError for a request that the model does not take."""
        encodes = isinstance(self._opened, OpenedEncoder)
        begin = (OF_ENCODERS if encodes else OF_GENERATORS).get(type(request))
        if begin is None:
            raise BadRequest(ENCODES if encodes else GENERATES)
        arrival = Arrival(monotonic(), time.time())
        begun = begin(self._opened, task.key, request, arrival)
        if not isinstance(begun, Preparation):
            self.prepared(Prepared(task, begun))
            return
        finish: Finish = partial(self._finish, task, begun)
        format, formats = begun.format, self._formats
        if format is not None:
            assert formats is not None, "prepare_run refuses a format without them"
            finish = partial(formats.constrain, format, finish)
            if not formats.knows(format):
                check = replace(begun, job=CheckFormat(format), size=len(text_of(format)))
                self._submit(task, check, partial(self._checked, task, begun, finish))
                return
        self._submit(task, begun, finish)

    def _submit(self, task: Task, preparation: Preparation, finish: Finish) -> None:
        """Submits the job to the service. The main thread or the service's thread calls it."""
        assert self._service is not None
        task.finish = finish
        job = preparation.job
        if isinstance(job, Encoded):
            self._service.submit_result(task, job)
        else:
            owner, size, deadline = preparation.owner, preparation.size, preparation.deadline
            self._service.submit(Waiting(task, owner, size, job, deadline))

    # The service's thread calls the methods below; the thread of the formats also calls `_finish`.

    def _deliver_result(self, task: Hashable, result: Result) -> None:
        """Passes the result of a task's preparation job to the function that waits for it."""
        assert isinstance(task, Task)
        finish, task.finish = task.finish, None
        if finish is not None:
            finish(result)

    def _checked(
        self, task: Task, preparation: Preparation, finish: Finish, result: Result
    ) -> None:
        """Submits the job for the prompt of a run, after another job has checked the format."""
        if isinstance(result, PoolError):
            finish(result)
        else:
            self._submit(task, preparation, finish)
            if task.state is State.CANCELLED:  # cancelled before the service knew the job
                assert self._service is not None
                self._service.cancel(task)

    def _finish(self, task: Task, preparation: Preparation, *results: Result | Constraint) -> None:
        """Makes the outcome of a preparation from the results of its jobs, and posts it.

        If one of `results` is an error, this error is the outcome.
        """
        outcome: Outcome | PoolError
        try:
            for result in results:
                if isinstance(result, PoolError):
                    raise result
            outcome = preparation.finish(*results)
        except PoolError as error:
            outcome = error
        except Exception as error:
            outcome = Internal(f"the prompt could not be read: {error!r}")
        self._post(Prepared(task, outcome))

    # ---- to the broker -------------------------------------------------------------------------

    def _end(self, task: Task, end: RunEnd | PoolError) -> None:
        """Ends a task that never reached the compute thread."""
        if isinstance(task.key, CallKey):
            self._answer(task, CallAnswer(end.body()))
        else:
            self._deliver([Delta(*task.name, task.position, "", b"", end=end.body())])

    def _answer(self, task: Task, content: CallAnswer) -> None:
        """Ends a call with an answer; no other method answers calls."""
        del self.tasks[task.name]
        id = task.key[0]
        try:
            self._link.send(content, id)
        except TooLarge as error:
            self._link.send(CallAnswer(error.body()), id)

    def _deliver(self, deltas: list[Delta]) -> None:
        ended = [delta[:2] for delta in deltas if delta.end is not None]
        for name in ended:
            self.tasks.pop(name, None)
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
        """Sends the credit: the capacity minus the runs that have not ended; 0 while draining."""
        free = 0 if self._draining else max(0, self._capacity - len(self.runs()))
        self._link.send(Credit(free, self._works))


_CANCELLED = RunEnd("cancelled")
