"""Prepares calls for an encoder model: from `embed` and the like to inputs, or to an error."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.encoder_calls import EncoderCall
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.to_worker import Work
from mlxpool.worker.compute.messages import Answer, CallKey, RunKey
from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder, check_ids
from mlxpool.worker.preparation.jobs import ENCODES, EncodedInputs, Result
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.process.preparations import (
    MakeService,
    Preparations,
    PreparedInputs,
    Product,
)
from mlxpool.worker.process.questions import check_call, inputs_of


class InputPreparer(Preparations):
    """Prepares the calls of an encoder model: one `PreparedInputs`, or `Answer` with an error."""

    def __init__(
        self, opened: OpenedEncoder, post: Callable[[Product], None], make_service: MakeService
    ) -> None:
        super().__init__(opened, post, make_service)
        self._opened = opened

    def prepare(self, key: RunKey, work: Work, fence: int = 0) -> None:
        """Refuse a `generate`: raises BadRequest."""
        raise BadRequest(ENCODES)

    def decide(self, key: CallKey, id: bytes, call: DecideCall, fence: int = 0) -> None:
        """Refuse a `decide`: raises BadRequest."""
        raise BadRequest(ENCODES)

    def encode(self, key: CallKey, id: bytes, call: EncoderCall, fence: int = 0) -> None:
        """Begin the preparation of a call. Raises BadRequest, ContextExceeded and TooLarge."""
        check_call(self._opened, call)
        if call.ids:
            check_ids(call.ids, self._opened.context, self._opened.vocab_size, call.first)
            inputs = tuple(EncoderInput(ids) for ids in call.ids)
            self._post(PreparedInputs(key, id, call, inputs, fence))
            return

        def finish(result: Result) -> PreparedInputs | Answer:
            if isinstance(result, PoolError):
                return Answer(key, id, CallAnswer(result.body()), fence)
            assert isinstance(result, EncodedInputs)
            return PreparedInputs(key, id, call, inputs_of(result), fence)

        job = EncodeInputs(
            call.texts, call.pairs, call.prompt_name, call.prompt, call.truncate, call.first
        )
        self._submit(Waiting(key, call.owner, call.size, job), finish)
