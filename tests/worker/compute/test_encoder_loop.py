"""Tests the loop of an encoder model: passes of several calls, owners' turns, failures, cancels."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mlxpool.common.errors import OutOfMemory
from mlxpool.common.protocol.encoder_calls import VECTORS, Task
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.worker.compute.encoder_calls import EncoderCalls
from mlxpool.worker.compute.encoder_loop import EncoderLoop
from mlxpool.worker.compute.messages import (
    Answer,
    CallKey,
    Compute,
    DeltaQueue,
    DropAll,
    DropCall,
    HandBack,
    HandedBack,
    Outbound,
)
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import DeviceLost
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.engine.engine import MemoryUse
from mlxpool.worker.system.cpu_threads import CpuThreads

POISON = 13  # a token id that makes a pass fail


class FakeEncoder:
    """An encoder that gives each input the vector (its first id, its length)."""

    tasks: frozenset[Task] = frozenset({"embed"})
    context, dimensions, normalises, digest = 64, 2, False, "d"
    labels: tuple[str, ...] = ()
    lines = 10
    yields_cores = divides = False

    def __init__(self) -> None:
        self.passes: list[list[int]] = []  # the first ids of the inputs of each pass
        self.error: Callable[[], Exception] = lambda: ValueError("the pass is bad")
        self.works = True

    def report_compiles(self, tell: Callable[[], None]) -> None:
        self.tell_compiles = tell

    def encode(self, inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        self.passes.append([item.ids[0] for item in inputs])
        if any(POISON in item.ids for item in inputs):
            raise self.error()
        return np.array([(item.ids[0], len(item.ids)) for item in inputs], np.float32)

    def device_works(self) -> bool:
        return self.works

    def memory(self) -> MemoryUse:
        return MemoryUse()

    def warm_up(self, on_progress: Callable[[], None]) -> None: ...

    def close(self) -> None: ...


class Ended(Exception):
    """Raised when all messages of the inbox have been read."""


class Inbox(queue.SimpleQueue[Any]):
    """An inbox that ends the loop when it would wait."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.empty():
            raise Ended
        return super().get(block, timeout)


class Harness:
    def __init__(self) -> None:
        self.encoder = FakeEncoder()
        self.inbox = Inbox()
        self.posted: list[Outbound] = []
        self.progress = progress = Progress(lambda: None)
        delta_queue = DeltaQueue(self.posted.append, progress)
        threads = CpuThreads(None, 1)
        self.loop = EncoderLoop(
            self.encoder, self.inbox, delta_queue, progress, threads, self.posted.append
        )

    def ask(self, number: int, *inputs: tuple[int, ...], **rest: Any) -> CallKey:
        key = CallKey(bytes([number]) * 16, number)
        inputs_ = tuple(EncoderInput(ids) for ids in inputs)
        self.inbox.put(Compute(key, inputs_, **rest))
        return key

    def run(self) -> dict[int, CallAnswer]:
        """Runs the loop until its inbox is empty; returns the answers by the number of the call."""
        with pytest.raises(Ended):
            self.loop.run()
        return {
            answer.key.number: answer.content
            for answer in self.posted
            if isinstance(answer, Answer)
        }


def rows_of(answer: CallAnswer) -> list[list[float]]:
    assert answer.kind == VECTORS
    values = np.frombuffer(answer.packed[0], "<f4")
    rows: list[list[float]] = values.reshape(answer.fields["rows"], -1).tolist()
    return rows


def test_calls_share_passes_and_rows_keep_their_order() -> None:
    harness = Harness()
    harness.ask(1, (1, 1, 1), (2,), (3, 3))
    harness.ask(2, (4,), (5,))
    answers = harness.run()
    assert rows_of(answers[1]) == [[1, 3], [2, 1], [3, 2]]
    assert rows_of(answers[2]) == [[4, 1], [5, 1]]
    assert answers[1].fields["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert len(harness.encoder.passes) == 1


def test_a_pass_has_at_most_its_lines_or_one_input() -> None:
    harness = Harness()
    harness.ask(1, (1,) * 9, (2,) * 30, (3,) * 6, (4,) * 4)
    assert rows_of(harness.run()[1]) == [[1, 9], [2, 30], [3, 6], [4, 4]]
    assert harness.encoder.passes == [[4, 3], [1], [2]]


def test_owners_have_turns() -> None:
    harness = Harness()
    harness.ask(1, *[(n,) * 4 for n in range(20, 30)], owner="a")
    harness.ask(2, (1,) * 4, owner="b")
    harness.run()
    assert harness.encoder.passes[0] == [20, 1]
    first = next(answer for answer in harness.posted if isinstance(answer, Answer))
    assert first.key.number == 2


def test_of_a_failed_pass_only_the_bad_call_ends() -> None:
    harness = Harness()
    harness.ask(1, (1,), (2,))
    harness.ask(2, (POISON,))
    harness.ask(3, (3,))
    answers = harness.run()
    assert rows_of(answers[1]) == [[1, 1], [2, 1]] and rows_of(answers[3]) == [[3, 1]]
    assert (
        answers[2].fields["code"] == "internal"
        and "the pass is bad" in answers[2].fields["message"]
    )
    assert len(harness.encoder.passes) == 4


def test_memory_that_runs_out_has_its_own_code() -> None:
    harness = Harness()
    harness.encoder.error = lambda: RuntimeError("[metal::malloc] out of memory")
    harness.ask(1, (POISON,))
    assert harness.run()[1].fields["code"] == OutOfMemory.code


@pytest.mark.parametrize("alone", [True, False])
def test_a_lost_device_ends_the_loop_and_names_a_call_that_was_alone(alone: bool) -> None:
    harness = Harness()
    harness.encoder.works = False
    harness.ask(1, (POISON,))
    if not alone:
        harness.ask(2, (2,))
    with pytest.raises(DeviceLost) as lost:
        harness.loop.run()
    assert lost.value.request == (bytes([1]) * 16 if alone else None)
    assert not harness.posted


def test_a_suspect_is_computed_alone() -> None:
    harness = Harness()
    harness.ask(1, (1,), (2,))
    harness.ask(2, (3,), (4,), alone=True)
    harness.ask(3, (5,))
    harness.run()
    assert [3, 4] in harness.encoder.passes
    assert sorted(chain(*harness.encoder.passes)) == [1, 2, 3, 4, 5]


def test_a_cancelled_call_has_no_answer() -> None:
    harness = Harness()
    key = harness.ask(1, (1,), (2,))
    harness.ask(2, (3,))
    harness.inbox.put(DropCall(key))
    harness.inbox.put(DropCall(CallKey(bytes(16), 99)))
    assert list(harness.run()) == [2]


def test_a_new_connection_forgets_all_calls() -> None:
    harness = Harness()
    harness.ask(1, (1,))
    harness.inbox.put(DropAll(7))
    harness.ask(2, (2,))
    assert list(harness.run()) == [2]


def test_a_drain_is_confirmed_and_calls_go_on() -> None:
    harness = Harness()
    harness.ask(1, (1,))
    harness.inbox.put(HandBack())
    assert list(harness.run()) == [1]
    assert any(isinstance(message, HandedBack) for message in harness.posted)


def test_dimensions_and_length_are_those_of_the_call() -> None:
    harness = Harness()
    harness.ask(1, (3, 3, 3, 3), normalise=True)
    harness.ask(2, (3,), dimensions=1)
    answers = harness.run()
    assert rows_of(answers[1]) == [[pytest.approx(0.6), pytest.approx(0.8)]]
    assert rows_of(answers[2]) == [[3]]


def test_the_first_pass_may_take_as_long_as_a_new_shape() -> None:
    """The normal time of a token, which limits later passes, is known only after the first pass."""
    harness, seen = Harness(), []
    encode = harness.encoder.encode

    def noted(inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        now = harness.progress.block.read()
        seen.append((now.fresh, now.usual_token_ns > 0))
        return encode(inputs)

    harness.encoder.encode = noted  # type: ignore[method-assign]
    harness.ask(1, (1,) * 9, (2,) * 9)
    harness.run()
    assert seen == [(True, False), (False, True)]


def test_a_pass_of_which_the_encoder_says_that_it_compiles_may_take_as_long() -> None:
    harness = Harness()
    seen: list[bool] = []
    encode = harness.encoder.encode

    def noted(inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        if len(seen) == 1:
            harness.encoder.tell_compiles()
        seen.append(harness.progress.block.read().fresh)
        return encode(inputs)

    harness.encoder.encode = noted  # type: ignore[method-assign]
    harness.ask(1, *[(number,) * 9 for number in range(3)])
    harness.run()
    assert seen == [True, True, False]


def test_an_empty_table_has_no_pass() -> None:
    assert EncoderCalls().next_pass(10) == []


def test_rows_that_are_no_numbers_fail_their_call_alone() -> None:
    harness = Harness()
    encode = harness.encoder.encode

    def damaged(inputs: Sequence[EncoderInput], threads: int = 1) -> npt.NDArray[np.float32]:
        rows = encode(inputs)
        rows[[item.ids[0] == 7 for item in inputs], 1] = np.nan
        return rows

    harness.encoder.encode = damaged  # type: ignore[method-assign]
    harness.ask(1, (1,), (2, 2))
    harness.ask(2, (3,), (7, 7), (5,), first=40)
    answers = harness.run()
    assert rows_of(answers[1]) == [[1, 1], [2, 2]]
    assert answers[2].fields["code"] == "internal"
    assert "for input 41 is not a number: the weights are damaged" in answers[2].fields["message"]
