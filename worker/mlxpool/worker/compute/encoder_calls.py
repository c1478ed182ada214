"""The open calls of an encoder model: selects the inputs of passes and collects vectors."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from time import monotonic

import numpy as np
from msgspec import Struct, field

from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES, VECTORS
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.worker.compute.messages import CallKey, Compute
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.vectors import Vectors, finished

FLOAT32 = np.dtype("<f4")
assert FLOAT32.itemsize == NUMBER_BYTES


class EncoderCallState(Struct, eq=False):
    """A call in progress.

    `pending`: indices of the inputs that no pass has computed, shortest first; `rows`: the computed
    vectors, by the index of the input.
    """

    message: Compute
    alone: bool
    pending: deque[int]
    rows: dict[int, Vectors] = field(default_factory=dict)
    began: float = field(default_factory=monotonic)

    @classmethod
    def of(cls, message: Compute) -> EncoderCallState:
        sizes = [len(item.ids) for item in message.inputs]
        return cls(message, message.alone, deque(sorted(range(len(sizes)), key=sizes.__getitem__)))

    @property
    def key(self) -> CallKey:
        return self.message.key

    @property
    def complete(self) -> bool:
        return len(self.rows) == len(self.message.inputs)

    def put_back(self, index: int) -> None:
        """Puts an input back after its pass has failed."""
        self.pending.appendleft(index)

    def answer(self, labels: Sequence[str], *, normalises: bool, now: float) -> CallAnswer:
        """Returns the answer to a complete call; `now`: monotonic seconds.

        `normalises`: whether vectors get length 1 if the call does not specify it.
        """
        message, count = self.message, len(self.message.inputs)
        normalise = normalises if message.normalise is None else message.normalise
        vectors = np.stack([self.rows[index] for index in range(count)])
        vectors = finished(vectors, message.dimensions, normalise=normalise)
        tokens = sum(len(item.ids) for item in message.inputs)
        fields = {
            "rows": count,
            "columns": vectors.shape[1],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "timings_ms": {"compute": round((now - self.began) * 1000, 3)},
        }
        if labels:
            fields["labels"] = list(labels)
        return CallAnswer(fields, (vectors.astype(FLOAT32, copy=False).tobytes(),), VECTORS)


class PassInput(Struct, frozen=True):
    """An input of a pass: the input of `call` with this index."""

    call: EncoderCallState
    index: int

    @property
    def input(self) -> EncoderInput:
        return self.call.message.inputs[self.index]


class EncoderCalls:
    """The open calls. Owners take turns, so that no owner's inputs delay other owners."""

    def __init__(self) -> None:
        self._open: dict[CallKey, EncoderCallState] = {}
        self._waiting: OrderedDict[str, OrderedDict[CallKey, EncoderCallState]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, call: EncoderCallState) -> bool:
        return self._open.get(call.key) is call

    def add(self, message: Compute) -> None:
        call = self._open[message.key] = EncoderCallState.of(message)
        self._wait(call)

    def remove(self, key: CallKey) -> None:
        """Remove a call; ignores a call that is not open."""
        call = self._open.pop(key, None)
        if call is not None:
            self._stop_waiting(call)

    def clear(self) -> None:
        self._open.clear()
        self._waiting.clear()

    def next_pass(self, lines: int) -> list[PassInput]:
        """Take the inputs of the next pass: one input, and further inputs up to `lines` tokens.

        A call that is computed alone has a pass of its own.
        """
        return [*self._take(lines)]

    def _take(self, lines: int) -> Iterator[PassInput]:
        room, first = lines, True
        while self._waiting:
            owner, own = next(iter(self._waiting.items()))
            call = next(iter(own.values()))
            index = call.pending[0]
            size = len(call.message.inputs[index].ids)
            if not first and (size > room or call.alone):
                return
            call.pending.popleft()
            if not call.pending:
                self._stop_waiting(call)
            room, first = room - size, False
            yield PassInput(call, index)
            if call.alone:
                yield from self._rest(call, room)
                return
            if owner in self._waiting:
                self._waiting.move_to_end(owner)

    def _rest(self, call: EncoderCallState, room: int) -> Iterator[PassInput]:
        """Yield the next inputs of one call that have at most `room` tokens together."""
        while call.pending:
            size = len(call.message.inputs[call.pending[0]].ids)
            if size > room:
                return
            room -= size
            yield PassInput(call, call.pending.popleft())
        self._stop_waiting(call)

    def retry_alone(self, inputs: Sequence[PassInput]) -> None:
        """Put back the calls of a failed pass, so that each is computed alone."""
        for failed in inputs:
            if failed.call in self:
                failed.call.alone = True
                failed.call.put_back(failed.index)
                self._wait(failed.call)

    def _wait(self, call: EncoderCallState) -> None:
        own = self._waiting.setdefault(call.message.owner, OrderedDict())
        own[call.key] = call

    def _stop_waiting(self, call: EncoderCallState) -> None:
        own = self._waiting.get(call.message.owner)
        if own is not None and own.pop(call.key, None) is not None and not own:
            del self._waiting[call.message.owner]
