"""Prepares requests for the compute thread: from `work` to a sequence, or to the request's error.

What takes long is done by the processes of worker/preparation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from time import monotonic

from mlxpool.common.answer_format import text_of
from mlxpool.common.errors import BadRequest, Internal, PoolError
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.prompts import image_bytes
from mlxpool.common.protocol.to_worker import Work
from mlxpool.worker.compute.messages import Admit, Answer, CallKey, RunKey
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.preparation.jobs import (
    GENERATES,
    Asked,
    CheckFormat,
    Encode,
    Encoded,
    Render,
    Result,
)
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.process.preparations import (
    Finish,
    MakeService,
    Preparations,
    Prepared,
    PreparedQuestions,
    Product,
)
from mlxpool.worker.process.prompts import admit_of, began_at, job_of
from mlxpool.worker.process.questions import job_of_questions, message_of
from mlxpool.worker.prompt.text_model import Opened

NO_FILE = "the model has no tokenizer file"


class Preparer(Preparations):
    """Prepares the requests of a model that generates text: one `Prepared` for each `prepare`."""

    def __init__(
        self, opened: Opened, post: Callable[[Product], None], make_service: MakeService
    ) -> None:
        super().__init__(opened, post, make_service)
        self.opened = opened
        self._formats = None
        if not opened.no_format and opened.source is not None:
            # Imports llguidance, which encoders and the counting model do not need.
            from mlxpool.worker.process.formats import Formats

            self._formats = Formats(opened)

    def start(self) -> None:
        """Starts to prepare, and to load the vocabulary of formats: no stream runs yet."""
        super().start()
        if self._formats is not None:
            self._formats.load()

    def is_ready(self, again: Callable[[], None]) -> bool:
        """See Preparations."""
        return self._formats is None or self._formats.is_loaded(again)

    def prepare(self, key: RunKey, work: Work, fence: int = 0) -> None:
        """Begin a preparation. Raises BadRequest, and ContextExceeded if it cannot fit."""
        received = monotonic()
        left = math.inf if work.deadline_ms is None else work.deadline_ms / 1000
        now = began_at(work, time.time())
        deadline = received + left
        job = job_of(self.opened, work, now)
        admit = partial(admit_of, self.opened, key, work, received, deadline, now)
        product = partial(product_of, key, fence, admit)
        begin = partial(self._begin, key, work, job, deadline)
        format = work.options.format
        if format is None:
            begin(product)
            return
        if self._formats is None:
            raise BadRequest(f"format is not supported: {self.opened.no_format or NO_FILE}")
        constrain = self._formats.constraining(format, product, self.post)
        if self._formats.knows(format):
            begin(constrain)
            return

        def checked(result: Result) -> Prepared | None:
            if isinstance(result, PoolError):
                return product(result)
            begin(constrain)
            return None

        size = len(text_of(format))
        self._submit(Waiting(key, work.owner, size, CheckFormat(format), deadline), checked)

    def _begin(
        self,
        key: RunKey,
        work: Work,
        job: Render | Encode | Encoded,
        deadline: float,
        finish: Finish,
    ) -> None:
        """Begin to prepare the prompt."""
        if isinstance(job, Encoded):
            self._submit_result(key, job, finish)
        else:
            size = work.prompt.size + image_bytes(work.prompt)
            self._submit(Waiting(key, work.owner, size, job, deadline), finish)

    def encode(self, key: CallKey, id: bytes, call: EncoderCall, fence: int = 0) -> None:
        """Refuse a call for an encoder model: raises BadRequest."""
        raise BadRequest(GENERATES)

    def decide(self, key: CallKey, id: bytes, call: DecideCall, fence: int = 0) -> None:
        """Begin the preparation of a `decide`. Raises BadRequest and ContextExceeded."""
        job = job_of_questions(self.opened, call, time.time())
        self._submit(
            Waiting(key, call.owner, call.size, job),
            partial(product_of_questions, self.opened, key, id, call, fence),
        )


def product_of(
    key: RunKey,
    fence: int,
    admit: Callable[[Encoded, Constraint | None], Admit],
    result: Result,
    constraint: Constraint | None = None,
) -> Prepared:
    """The run of a prompt that was prepared, or the error that it ends with."""
    try:
        if isinstance(result, PoolError):
            return Prepared(key, None, result, fence)
        assert isinstance(result, Encoded)
        return Prepared(key, admit(result, constraint), fence=fence)
    except PoolError as error:
        return Prepared(key, None, error, fence)
    except Exception as error:
        failed = Internal(f"the prompt could not be read: {error!r}")
        return Prepared(key, None, failed, fence)


def product_of_questions(
    opened: Opened, key: CallKey, id: bytes, call: DecideCall, fence: int, result: Result
) -> PreparedQuestions | Answer:
    """The call for the compute thread, or its answer with an error."""
    try:
        if isinstance(result, PoolError):
            raise result
        assert isinstance(result, Asked)
        return PreparedQuestions(message_of(opened, key, id, call, result), fence)
    except PoolError as error:
        return Answer(key, id, CallAnswer(error.body()), fence)
