"""Prepares calls for an encoder model: from `embed` and the like to inputs, or to an error."""

from __future__ import annotations

from collections.abc import Callable

from mlxpool.common.errors import BadRequest, PoolError, TooLarge
from mlxpool.common.protocol.bounds import MAX_BLOB
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES, EncoderCall
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.messages import Answer, CallKey, RunKey
from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder, check_ids
from mlxpool.worker.encoders.vectors import require_dimensions
from mlxpool.worker.preparation.jobs import ENCODES, EncodedInputs, Result
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.process.preparations import (
    MakeService,
    Preparations,
    PreparedInputs,
    Product,
)


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


def check_call(opened: OpenedEncoder, call: EncoderCall) -> None:
    """Raises BadRequest for what this model does not do, TooLarge for an answer over its bound."""
    if call.task not in opened.tasks:
        can = " and ".join(sorted(opened.tasks))
        raise BadRequest(f"this model does not {call.task}: it is a model for {can}")
    if call.dimensions:
        require_dimensions(call.dimensions, opened.dimensions)
    columns = call.dimensions or opened.dimensions or len(opened.labels) or 1
    size = call.count * columns * NUMBER_BYTES
    if size > MAX_BLOB:
        raise TooLarge(
            f"{call.count} vectors of {columns} numbers have {size} bytes, an answer has at most"
            f" {MAX_BLOB}: send {MAX_BLOB // (columns * NUMBER_BYTES)} inputs at most in a call"
        )


def inputs_of(found: EncodedInputs) -> tuple[EncoderInput, ...]:
    """The inputs that a lane made."""
    ids, types, begin, inputs = unpack_ids(found.packed), found.types, 0, []
    for length in found.lengths:
        end = begin + length
        inputs.append(EncoderInput(tuple(ids[begin:end]), tuple(types[begin:end])))
        begin = end
    return tuple(inputs)
