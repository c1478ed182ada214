"""Messages between ranks, and the pipes that carry them. Needs no MLX."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from mlxpool.common.progress import Block
from mlxpool.worker.groups import pipes
from mlxpool.worker.groups.links import GroupLinks, Meeting
from mlxpool.worker.groups.messages import (
    Again,
    Begin,
    CopyBlock,
    Ended,
    Head,
    MakePool,
    Message,
    Pass,
    Settle,
    decoded,
    encoded,
)
from mlxpool.worker.groups.pipes import LENGTH_BYTES, Inbox, Orders

PASS = Pass(
    rows=[3, 9],
    offsets=[0, 120],
    counts=[64, 1],
    lines=[1, 1],
    hidden=[0],
    tables=[[3, 0, [7, 8]], [9, 2, [11]]],  # type: ignore[list-item]
    left=[1],
    ids=[*range(64), -1],
    wanted=[1, 0],
    drawn=4,
    fresh=True,
    builds=False,
)
AGAIN = Again(ids=[5, -2], tables=[[9, 3, [12]]], left=[3], drawn=2)  # type: ignore[list-item]
MESSAGES: list[Message] = [
    Begin(),
    MakePool(24, 8, 512, 128, "pool", "int8"),
    CopyBlock(3, 17),
    PASS,
    AGAIN,
    Ended(),
    Head(12, 4096),
    Settle(2**28),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert decoded(encoded(message)) == message


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        try:
            os.close(descriptor)
        except OSError:
            pass  # the test has closed the descriptor


def test_messages_arrive_whole_and_in_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    orders, inbox = Orders([writer]), Inbox(reader)
    for message in MESSAGES:
        orders.send(message)
    assert [inbox.take() for _ in MESSAGES] == MESSAGES
    assert orders.passes == 2  # one `Pass` and one `Again`
    os.close(writer)
    assert inbox.take() is None
    inbox.close()


def test_a_pass_that_is_only_built_is_not_awaited(pipe: tuple[int, int]) -> None:
    block = Block.private()
    orders = Orders([pipe[1]], block)
    orders.send(Pass(*([],) * 9, 0, True, True))
    assert (orders.passes, block.read().orders) == (0, 1)


def test_a_rank_that_has_ended_is_noticed(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send to an ended rank raises BrokenPipeError, after a short wait for the rank's end."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    os.close(pipe[0])
    orders = Orders([pipe[1]])
    assert not orders.broken
    with pytest.raises(BrokenPipeError):
        orders.send(CopyBlock(3, 17))
    assert orders.broken and orders.passes == 0 and waited == [pipes.BLAME_TIME]


@pytest.mark.parametrize("size", [1, LENGTH_BYTES, LENGTH_BYTES + 1])
def test_a_message_that_was_cut_off_is_the_end_of_rank_0(pipe: tuple[int, int], size: int) -> None:
    """If rank 0 is killed while it writes a message, the reader gets only the end of rank 0."""
    data = encoded(PASS)
    inbox = Inbox(pipe[0])
    os.write(pipe[1], (len(data).to_bytes(LENGTH_BYTES, "little") + data)[:size])
    os.close(pipe[1])
    assert inbox.take() is None
    inbox.close()


def test_rank_0_waits_until_all_others_are_about_to_join(pipe: tuple[int, int]) -> None:
    links = GroupLinks(Meeting(0, 4, "", 0), Orders([]), pipe[0])
    calls: list[bool] = []
    os.write(pipe[1], b"1")
    os.write(pipe[1], b"11")
    links.wait_until_ready(lambda: calls.append(True))
    assert calls
