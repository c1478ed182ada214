"""The requests with which a client submits and reads a batch, with answers from the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxpool.client.batches import steps
from mlxpool.client.batches.outcome import count_bad, count_ended, line_result
from mlxpool.client.batches.source import Source
from mlxpool.client.batches.steps import Pause, Steps, Work
from mlxpool.common.errors import (
    BadRequest,
    DuplicateId,
    PoolError,
    QueueFull,
    StoreFull,
    UnknownJob,
)
from mlxpool.common.protocol.kept.batch_messages import SubmitBatch
from mlxpool.common.protocol.kept.file_messages import DELETE, READ, PutFile
from mlxpool.common.protocol.token_ids import pack_ids

LINES = [{"prompt": "a", "model": "m"}]
SETTINGS: dict[str, Any] = {"priority": 1}


class Broker:
    """Answers a client's requests by their type; `put` has the answers to `file_put`, in order."""

    def __init__(self, *put: Any, complete: bool = False) -> None:
        self.put = list(put)
        self.complete = complete
        self.asked: list[Any] = []
        self.paused: list[float] = []

    def perform(self, generator: Steps[Any]) -> Any:
        step = next(generator)
        try:
            while True:
                answer = self._answer(step)
                send: Callable[[Any], Any] = generator.send
                step = generator.throw(answer) if isinstance(answer, PoolError) else send(answer)
        except StopIteration as end:
            return end.value

    def _answer(self, step: Any) -> Any:
        if isinstance(step, Pause):
            self.paused.append(step.seconds)
            return None
        if isinstance(step, Work):
            try:
                return step.call()
            except PoolError as error:
                return error
        content = step.content
        self.asked.append(content)
        if isinstance(content, PutFile):
            answer = self.put.pop(0) if self.put else {}
            return (
                answer if isinstance(answer, PoolError) else {"size": len(content.data), **answer}
            )
        if content.kind in (READ, DELETE):
            return {"complete": self.complete}
        assert isinstance(content, SubmitBatch)
        return {"key": content.name.key}

    @property
    def kinds(self) -> list[str]:
        return [content.kind for content in self.asked]


def submit(broker: Broker, lines: Any = LINES, sent: Any = None) -> Any:
    return broker.perform(steps.submit(Source(lines, {}), "key", SETTINGS, sent))


def test_a_file_goes_out_before_its_batch() -> None:
    broker, sent = Broker(), list[int]()
    assert submit(broker, sent=sent.append) == {"key": "key"}
    put, batch = broker.asked
    assert put.last and sent == [len(put.data)]
    assert (batch.file, batch.lines, batch.priority, len(batch.digest)) == ("key", 1, 1, 32)


def test_a_busy_store_is_asked_again_after_its_time() -> None:
    broker = Broker(QueueFull("busy", retry_after_ms=2500), QueueFull("busy"))
    submit(broker)
    assert broker.paused == [2.5, 1.0] and broker.kinds == ["file_put"] * 3 + ["batch_submit"]


def test_a_store_that_stays_busy_is_given_up() -> None:
    with pytest.raises(QueueFull):
        submit(Broker(*[QueueFull("busy")] * (steps.PATIENCE + 1)))


def test_other_errors_end_it_at_once() -> None:
    broker = Broker(StoreFull("full"))
    with pytest.raises(StoreFull):
        submit(broker)
    assert broker.kinds == ["file_put"]


def test_what_an_earlier_program_left_unfinished_is_replaced() -> None:
    broker = Broker(DuplicateId("other bytes"))
    submit(broker)
    assert broker.kinds == ["file_put", "file", "file_delete", "file_put", "batch_submit"]


@pytest.mark.parametrize(("complete", "lines"), [(True, LINES), (False, iter(LINES))])
def test_a_complete_file_is_never_replaced(complete: bool, lines: Any) -> None:
    broker = Broker(DuplicateId("other bytes"), complete=complete)
    with pytest.raises(DuplicateId):
        submit(broker, lines)
    assert "file_delete" not in broker.kinds


def test_a_file_that_changes_meanwhile_is_noticed() -> None:
    with pytest.raises(DuplicateId, match="was changed by another program"):
        submit(Broker({"size": 3}, {"size": 3}))


def test_a_bad_line_leaves_nothing_behind() -> None:
    broker = Broker()
    with pytest.raises(BadRequest, match="line 2"):
        submit(broker, [*LINES, {"prompt": 5}])
    assert broker.kinds == ["file", "file_delete"]


# ---- outcomes ------------------------------------------------------------------------------------


def row(**fields: Any) -> dict[str, Any]:
    return {"line": 4, "id": "four", "state": "done", "job": b"j" * 16, **fields}


def test_a_row_is_a_result_or_an_error() -> None:
    done = {"kind": "done", "body": {"reason": "stop", "text": "!", "attempts": 2}}
    line = line_result(row(text="ab", ids=pack_ids([1, 2]), seed=9, end=done, whole=True))
    assert line.result is not None and line.error is None
    assert (line.text, line.result.ids, line.result.seed) == ("ab!", (1, 2), 9)
    error = {"kind": "error", "body": {"code": "unknown_job", "message": "why"}}
    failed = line_result({"line": 1, "id": "", "state": "failed", "end": error})
    assert isinstance(failed.error, UnknownJob) and (failed.job, failed.text) == (None, "")
    assert line_result(row(whole=False), BadRequest("x")).error is not None
    gone = line_result(row(state="gone", whole=True))
    assert (gone.result, gone.error, gone.state) == (None, None, "gone")


def test_lines_are_counted_by_their_ends() -> None:
    counts = {"done": 1, "dead": 2, "expired": 4, "cancelled": 8, "failed": 16, "running": 32}
    assert (count_ended(counts), count_bad(counts)) == (31, 22)
