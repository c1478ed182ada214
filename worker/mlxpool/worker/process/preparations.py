"""What preparations of all kinds of requests share: the service, and what becomes of results."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from msgspec import Struct

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize
from mlxpool.worker.compute.messages import Admit, Answer, CallKey, Decide, RunKey
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.preparation.jobs import (
    Decode,
    Job,
    Result,
)
from mlxpool.worker.preparation.lane_service import LaneService
from mlxpool.worker.preparation.lanes import ForkServer
from mlxpool.worker.preparation.limits import Limits
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.preparation.room import WorkerMemory
from mlxpool.worker.preparation.service import Deliver, InlineService, Load, Service
from mlxpool.worker.process.questions import answer_of, encode_of_call
from mlxpool.worker.prompt.text_model import Opened, TokenTable
from mlxpool.worker.system.cpu_threads import process_cpu_threads


class Prepared(Struct, frozen=True):
    """A run for the compute thread, or the error that it ends with. `fence`: see StepDeltas."""

    key: RunKey
    admit: Admit | None
    error: PoolError | None = None
    fence: int = 0


class PreparedInputs(Struct, frozen=True):
    """The inputs of a call for an encoder model. `id`: the call's; `fence`: see StepDeltas."""

    key: CallKey
    id: bytes
    call: EncoderCall
    inputs: tuple[EncoderInput, ...]
    fence: int = 0


class PreparedQuestions(Struct, frozen=True):
    """A call of `decide` for the compute thread. `fence`: see StepDeltas."""

    message: Decide
    fence: int = 0


Product = Prepared | PreparedInputs | PreparedQuestions | Answer
Finish = Callable[[Result], Product | None]  # None: the product follows later
MakeService = Callable[[Opened | OpenedEncoder, Deliver], Service]


def service_of(
    opened: Opened | OpenedEncoder,
    deliver: Deliver,
    *,
    limits: Limits,
    memory_limit: int = 0,
    worker_memory: WorkerMemory | None = None,
) -> Service:
    """The service for a model: with processes, unless its text functions are our own code.

    `memory_limit`: bytes of the worker and these processes together; 0: no limit. `worker_memory`
    makes room for these.
    """
    if isinstance(opened, Opened) and opened.source is None:
        assert not isinstance(opened.text, TokenTable)
        return InlineService(opened.text, deliver)
    assert opened.source is not None
    server = ForkServer(opened.source, limits)
    return LaneService(
        server, deliver, process_cpu_threads(), memory_limit, worker_memory=worker_memory
    )


class Preparations:
    """Posts one product for each thing that it is asked to prepare, in any order."""

    def __init__(
        self,
        opened: Opened | OpenedEncoder,
        post: Callable[[Product], None],
        make_service: MakeService,
    ) -> None:
        self._vocab_size = opened.vocab_size
        self._plain = isinstance(opened, Opened) and opened.plain_contents  # see Render
        self._post = post
        self._service = make_service(opened, self._deliver)
        self._finish: dict[Hashable, Finish] = {}  # by key, of what is not posted yet

    def start(self) -> None:
        self._service.start()

    def is_ready(self, again: Callable[[], None]) -> bool:
        """Whether requests can be prepared; if not, a thread calls `again` when they can."""
        return True

    @property
    def load(self) -> Load:
        """What waits and runs."""
        return self._service.load

    def answer(self, key: CallKey, id: bytes, call: Tokenize | Detokenize, fence: int = 0) -> None:
        """Begin a call of the tokenizer."""
        job = (
            encode_of_call(call, self._plain, time.time())
            if isinstance(call, Tokenize)
            else self._decode(call)
        )
        waiting = Waiting(key, call.owner, call.size, job)
        self._submit(waiting, lambda result: Answer(key, id, answer_of(result), fence))

    def _decode(self, call: Detokenize) -> Job:
        return Decode(call.packed, self._vocab_size, call.each)

    def cancel(self, key: RunKey | CallKey) -> None:
        """End a preparation; its product follows unless it was posted already."""
        self._service.cancel(key)

    def drop_all(self) -> None:
        """End all preparations without a product."""
        self._finish.clear()
        self._service.cancel_all()

    def _submit(self, waiting: Waiting, finish: Finish) -> None:
        self._finish[waiting.key] = finish
        self._service.submit(waiting)

    def _submit_result(self, key: Hashable, result: Result, finish: Finish) -> None:
        """Have a result that needs no job finished in the service's thread."""
        self._finish[key] = finish
        self._service.submit_result(key, result)

    def _deliver(self, key: Hashable, result: Result) -> None:
        finish = self._finish.pop(key, None)
        if finish is not None:
            self.post(finish(result))

    def post(self, product: Product | None) -> None:
        """Post a product, if there is one. Any thread may call it."""
        if product is not None:
            self._post(product)
