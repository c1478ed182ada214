"""The loop of the compute thread of an encoder model: takes calls, computes passes, answers.

A pass has inputs of several calls, up to the number of tokens that suits the device.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NoReturn

import numpy as np

from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.worker.compute.encoder_calls import EncoderCalls, PassInput
from mlxpool.worker.compute.messages import (
    Answer,
    CallKey,
    Compute,
    DeltaQueue,
    DropAll,
    DropCall,
    HandBack,
    Inbound,
    Outbound,
)
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import DeviceLost, as_pool_error
from mlxpool.worker.encoders.vectors import Vectors
from mlxpool.worker.engine.encoding.encoder import Encoder
from mlxpool.worker.system.cpu_threads import CpuThreads

log = logging.getLogger("mlxpool.worker")

LAYOUT = "passes"  # the layout that the command `models` shows


class EncoderLoop:
    """The loop of an encoder model's compute thread; owns the encoder."""

    def __init__(
        self,
        encoder: Encoder,
        inbox: queue.SimpleQueue[Inbound],
        delta_queue: DeltaQueue,
        progress: Progress,
        cpu_threads: CpuThreads,
        post: Callable[[Outbound], None],
    ) -> None:
        """`post` sends a message to the main thread.

        `delta_queue` stores the fence of the newest DropAll, which later messages carry; see
        StepDeltas.
        """
        self._encoder = encoder
        encoder.report_compiles(progress.compiles)
        self._inbox = inbox
        self._delta_queue = delta_queue
        self._progress = progress
        self._cpu_threads = cpu_threads
        if encoder.divides:
            cpu_threads.divide_steps()
        self._post = post
        self._calls = EncoderCalls()
        self._has_computed = False  # whether any pass was computed
        self._report_memory(monotonic())

    def run(self) -> NoReturn:
        """Serve until an exception ends the thread: DeviceLost, or a fault of this program."""
        while True:
            self._take_messages()
            self._pass()
            now = monotonic()
            if self._progress.memory.is_due(now):
                self._report_memory(now)

    def _take_messages(self) -> None:
        """Handle the messages in the inbox; if no call is open, wait for a message."""
        if not self._calls:
            self._report_memory(monotonic())
            self._progress.running = self._progress.waiting = 0
            self._progress.enter("idle")
            self._cpu_threads.end_steps()
            self._handle(self._inbox.get())
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, message: Inbound) -> None:
        if isinstance(message, Compute):
            self._calls.add(message)
        elif isinstance(message, DropCall):
            self._calls.remove(message.key)
        elif isinstance(message, DropAll):
            self._calls.clear()
            self._delta_queue.fence = message.fence
        elif isinstance(message, HandBack):  # calls are answered before a drained worker ends
            self._delta_queue.handed_back()

    def _pass(self) -> None:
        """Compute one pass, and answer the calls that it completes."""
        inputs = self._calls.next_pass(self._encoder.lines)
        if not inputs:
            return
        self._cpu_threads.begin_step(monotonic())
        calls = {part.call.key: part.call for part in inputs}
        request = next(iter(calls.values())).key.id if len(calls) == 1 else None
        tokens = sum(len(part.input.ids) for part in inputs)
        self._progress.running = len(calls)
        self._progress.waiting = len(self._calls) - len(calls)
        self._progress.awaits(request, tokens, len(inputs))
        if not self._has_computed:
            self._progress.compiles()  # the time of a pass is not known yet
        try:
            rows = self._encoder.encode([part.input for part in inputs], self._cpu_threads.parts)
        except Exception as error:
            self._failed(error, inputs, request)
            return
        self._has_computed = True
        self._progress.ended(fresh=False)
        self._deliver(inputs, rows)

    def _deliver(self, inputs: Sequence[PassInput], rows: Vectors) -> None:
        now = monotonic()
        for part, row in zip(inputs, rows, strict=True):
            call = part.call
            call.rows[part.index] = row
            if not np.isfinite(row).all():
                # Other inputs of the call may be sound, but a call fails as a whole.
                if call in self._calls:
                    self._answer(call.key, CallAnswer(_no_numbers(part).body()))
            elif call.complete and call in self._calls:
                encoder = self._encoder
                answer = call.answer(encoder.labels, normalises=encoder.normalises, now=now)
                self._answer(call.key, answer)

    def _answer(self, key: CallKey, content: CallAnswer) -> None:
        """Send the answer of a call, and remove the call."""
        self._calls.remove(key)
        self._post(Answer(key, content))

    def _failed(self, error: Exception, inputs: Sequence[PassInput], request: bytes | None) -> None:
        """Handle a failed pass: end its call if it has only one, else compute its calls one by one.

        Raises DeviceLost.
        """
        log.warning("a pass failed", exc_info=error)
        self._progress.failed()
        if not isinstance(error, PoolError):
            # In this phase the broker's time limit applies, which detects a device that hangs.
            self._progress.enter("decode")
            self._progress.moved()
            if not self._encoder.device_works():
                raise DeviceLost(error, request) from error
        if request is None:
            self._calls.retry_alone(inputs)
            return
        call = inputs[0].call
        self._answer(call.key, CallAnswer(as_pool_error(error).body()))

    def _report_memory(self, now: float) -> None:
        """Copy the encoder's memory figures into the progress, for the heartbeats."""
        self._progress.memory.read(self._encoder.memory(), now)


def _no_numbers(part: PassInput) -> Internal:
    return Internal(
        f"the result for input {part.call.message.first + part.index} is not a number: the weights"
        " are damaged or overflow in their dtype"
    )
