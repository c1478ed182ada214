"""Cancels from the status page: a request is found by the first digits of its id."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mlxpool.broker.admin.commands import Commands, Controls
from mlxpool.broker.core import events as ev
from mlxpool.broker.edge.page_requests import PageCancels
from mlxpool.broker.http.loop_exchange import LoopQueue
from mlxpool.common.errors import BadRequest
from support.core_harness import Story


@pytest.fixture
def queue() -> Iterator[LoopQueue[str]]:
    with LoopQueue[str]() as loop_queue:
        yield loop_queue


def page_cancels(story: Story, queue: LoopQueue[str]) -> PageCancels:
    unused = Controls(
        snapshot=lambda now, listing: pytest.fail("unused"),
        last_dump=lambda slot: None,
        reloaded=lambda: {},
        stop=lambda now: None,
        drain_grace=lambda: 0.0,
    )

    def perform(event: ev.Event, now: float) -> None:
        story.do(event)

    commands = Commands(story.core, unused, perform)
    return PageCancels(queue, story.core.state, commands)


def test_the_request_whose_id_begins_so_is_cancelled(story: Story, queue: LoopQueue[str]) -> None:
    ids = [bytes.fromhex(f"{digits:<032}") for digits in ("aa01", "aa02", "bb")]
    for each in ids:
        story.generate(each)
    cancels = page_cancels(story, queue)
    assert cancels.cancel("aa02", story.now) == {"state": "queued", "pos": 0}
    assert list(story.core.state.requests) == [ids[0], ids[2]]


def test_the_log_of_operators_commands_has_the_whole_id(
    story: Story, queue: LoopQueue[str], caplog: pytest.LogCaptureFixture
) -> None:
    id = bytes.fromhex(f"{'aa01':<032}")
    story.generate(id)
    with caplog.at_level(logging.INFO):
        page_cancels(story, queue).cancel("aa", story.now)
    assert [vars(record)["id"] for record in caplog.records if record.message == "operator"] == [
        id.hex()
    ]


def test_what_is_not_one_live_request_is_refused(story: Story, queue: LoopQueue[str]) -> None:
    for digits in ("aa01", "aa02"):
        story.generate(bytes.fromhex(f"{digits:<032}"))
    cancels = page_cancels(story, queue)
    with pytest.raises(BadRequest, match="2 live requests have ids that begin with aa"):
        cancels.cancel("aa", story.now)
    with pytest.raises(BadRequest, match="begins with cc: it has ended or never was"):
        cancels.cancel("cc", story.now)
    assert len(story.core.state.requests) == 2
