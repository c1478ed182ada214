"""The calls of this worker: of its tokenizer, or for its model, until answer or cancel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from mlxpool.common.errors import PoolError, TooLarge
from mlxpool.common.protocol.decisions import DECIDE, DecideCall
from mlxpool.common.protocol.encoder_calls import TASKS, EncoderCall, Task
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize
from mlxpool.worker.compute.messages import Answer, CallKey, Compute, Decide, DropCall, Inbound
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.preparations import PreparedInputs, PreparedQuestions
from mlxpool.worker.process.prepare import Preparer
from mlxpool.worker.process.prepare_inputs import InputPreparer


class ModelCalls:
    """A table of open calls. Belongs to the main thread."""

    def __init__(self, link: Link, compute: Callable[[Inbound], None]) -> None:
        """`compute` sends a message to the compute thread."""
        self._link = link
        self._compute = compute
        self._preparer: Preparer | InputPreparer | None = None
        self._keys = map(CallKey, count())
        self._open: dict[bytes, CallKey] = {}  # by the id of the call
        self._computing: set[CallKey] = set()  # those that the compute thread has

    def opened(self, preparer: Preparer | InputPreparer) -> None:
        """The model's text functions are there."""
        self._preparer = preparer

    def begin(self, message: Message, fence: int) -> None:
        """Take a call; one that cannot be read is answered at once."""
        if self._preparer is None:
            return
        id, kind, body, blobs = message.header.id or b"", message.kind, message.body, message.blobs
        key = self._open[id] = next(self._keys)
        try:
            if kind == Tokenize.kind:
                self._preparer.answer(key, id, Tokenize.parse(body, blobs), fence)
            elif kind == Detokenize.kind:
                self._preparer.answer(key, id, Detokenize.parse(body, blobs), fence)
            elif kind == DECIDE:
                self._preparer.decide(key, id, DecideCall.parse(body, blobs), fence)
            else:
                call = EncoderCall.parse(_task(kind), body, blobs)
                self._preparer.encode(key, id, call, fence)
        except PoolError as error:
            self.answered(Answer(key, id, CallAnswer(error.body()), fence))

    def prepared(self, prepared: PreparedInputs | PreparedQuestions) -> None:
        """What a call needs is there; the model computes it unless it was cancelled."""
        message: Compute | Decide
        if isinstance(prepared, PreparedQuestions):
            message = prepared.message
        else:
            message = _compute_of(prepared)
        if self._open.get(message.id) == message.key:
            self._computing.add(message.key)
            self._compute(message)

    def cancel(self, id: bytes) -> None:
        """Stop what is done for a call, which gets no answer."""
        key = self._open.pop(id, None)
        if key is None or self._preparer is None:
            return
        if key in self._computing:
            self._computing.discard(key)
            self._compute(DropCall(key))
        else:
            self._preparer.cancel(key)

    def answered(self, answer: Answer) -> None:
        """A call has its answer, which is sent unless the call was cancelled."""
        self._computing.discard(answer.key)
        if self._open.get(answer.id) == answer.key:
            del self._open[answer.id]
            self._send(answer.id, answer.content)

    def drop_all(self) -> None:
        """Forget all calls: the broker gives them to another worker.

        `Runs` stops the preparer and the compute thread.
        """
        self._open.clear()
        self._computing.clear()

    def _send(self, id: bytes, answer: CallAnswer) -> None:
        try:
            self._link.send(answer, id)
        except TooLarge as error:
            self._link.send(CallAnswer(error.body()), id)


def _task(kind: str) -> Task:
    return next(task for task in TASKS if task == kind)


def _compute_of(prepared: PreparedInputs) -> Compute:
    """The message with the inputs of a call for an encoder model."""
    call = prepared.call
    return Compute(
        prepared.key,
        prepared.id,
        prepared.inputs,
        call.owner,
        call.dimensions,
        call.normalise,
        call.first,
        call.alone,
    )
