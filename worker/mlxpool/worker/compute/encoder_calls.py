"""The calls that an encoder model computes: which inputs the next pass has, and what is missing."""

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
    """A call that is computed. `pending`: the indices of inputs that no pass has had, shortest
    first; `rows`: what is known of its vectors, by the index of the input.
    """

    message: Compute
    alone: bool
    pending: deque[int]
    rows: dict[int, Vectors] = field(default_factory=dict)
    began: float = field(default_factory=monotonic)

    @classmethod
    def of(cls, message: Compute) -> EncoderCallState:
        sizes = [len(one.ids) for one in message.inputs]
        return cls(message, message.alone, deque(sorted(range(len(sizes)), key=sizes.__getitem__)))

    @property
    def key(self) -> CallKey:
        return self.message.key

    @property
    def complete(self) -> bool:
        return len(self.rows) == len(self.message.inputs)

    def put_back(self, index: int) -> None:
        """A pass with this input has failed."""
        self.pending.appendleft(index)

    def answer(self, labels: Sequence[str], *, normalises: bool, now: float) -> CallAnswer:
        """The answer to a complete call. `normalises`: whether the model's vectors have length 1
        where the call does not say; `now`: monotonic seconds.
        """
        message, count = self.message, len(self.message.inputs)
        normalise = normalises if message.normalise is None else message.normalise
        found = np.stack([self.rows[index] for index in range(count)])
        found = finished(found, message.dimensions, normalise=normalise)
        tokens = sum(len(one.ids) for one in message.inputs)
        fields = {
            "rows": count,
            "columns": found.shape[1],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "timings_ms": {"compute": round((now - self.began) * 1000, 3)},
        }
        if labels:
            fields["labels"] = list(labels)
        return CallAnswer(fields, (found.astype(FLOAT32, copy=False).tobytes(),), VECTORS)


class PassInput(Struct, frozen=True):
    """One input of a pass: that of a call with this index."""

    call: EncoderCallState
    index: int

    @property
    def input(self) -> EncoderInput:
        return self.call.message.inputs[self.index]


class EncoderCalls:
    """The open calls. Owners have turns, so that many inputs of one do not delay another's."""

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
        """A call has ended; one that is not open is ignored."""
        call = self._open.pop(key, None)
        if call is not None:
            self._stop_waiting(call)

    def clear(self) -> None:
        self._open.clear()
        self._waiting.clear()

    def next_pass(self, lines: int) -> list[PassInput]:
        """Take the inputs of the next pass: at least one, together at most `lines` tokens.

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
        """More inputs of one call, as far as there is room."""
        while call.pending:
            size = len(call.message.inputs[call.pending[0]].ids)
            if size > room:
                return
            room -= size
            yield PassInput(call, call.pending.popleft())
        self._stop_waiting(call)

    def retry_alone(self, inputs: Sequence[PassInput]) -> None:
        """A pass with several calls has failed: each of them is computed by itself."""
        for one in inputs:
            if one.call in self:
                one.call.alone = True
                one.call.put_back(one.index)
                self._wait(one.call)

    def _wait(self, call: EncoderCallState) -> None:
        own = self._waiting.setdefault(call.message.owner, OrderedDict())
        own[call.key] = call

    def _stop_waiting(self, call: EncoderCallState) -> None:
        own = self._waiting.get(call.message.owner)
        if own is not None and own.pop(call.key, None) is not None and not own:
            del self._waiting[call.message.owner]
