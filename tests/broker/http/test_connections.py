"""The choice of the connection that the HTTP server closes to make room."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mlxpool.broker.http.server import MAX_CONNECTIONS, MAX_SECONDS, Connections, Stage
from support.pool import PATIENCE


class Guest:
    """A connection: the server has one end; the test's end sees whether the server closed it."""

    def __init__(self) -> None:
        self.inner, self.outer = socket.socketpair()
        self.outer.settimeout(PATIENCE)
        self.outer.setblocking(False)

    @property
    def shut(self) -> bool:
        try:
            return self.outer.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def guests() -> Iterator[list[Guest]]:
    """Makes one connection more than the server's limit."""
    with ExitStack() as stack:
        connections = [Guest() for _ in range(MAX_CONNECTIONS + 1)]
        for guest in connections:
            stack.enter_context(guest.inner)
            stack.enter_context(guest.outer)
        yield connections


def full(guests: list[Guest], *stages: Stage) -> Connections:
    """Returns full Connections, without the last guest; each guest arrives a second after another.

    Guest i is in `stages[i]`. The guests after these are in the last stage.
    """
    connections = Connections()
    for place, guest in enumerate(guests[:-1]):
        assert connections.add(guest.inner, float(place))
        connections.set_stage(guest.inner, stages[min(place, len(stages) - 1)])
    return connections


def shut(guests: list[Guest]) -> list[int]:
    return [place for place, guest in enumerate(guests) if guest.shut]


def test_connections_up_to_the_bound_are_kept(guests: list[Guest]) -> None:
    assert len(full(guests, Stage.REQUEST)) == MAX_CONNECTIONS
    assert shut(guests) == []


@pytest.mark.parametrize(
    ("stages", "gives_way"),
    [
        ((Stage.REQUEST,), 0),
        ((Stage.SENDING,), 0),
        ((Stage.ANSWER, Stage.REQUEST), 1),
        ((Stage.ANSWER, Stage.SENDING), 1),
        ((Stage.SENDING, Stage.ANSWER, Stage.REQUEST), 2),
        ((Stage.ANSWER, Stage.ANSWER, Stage.SENDING, Stage.ANSWER), 2),
    ],
)
def test_the_oldest_idle_connection_is_closed_for_a_new_one(
    guests: list[Guest], stages: tuple[Stage, ...], gives_way: int
) -> None:
    connections = full(guests, *stages)
    assert connections.add(guests[-1].inner, 9.0)
    assert shut(guests) == [gives_way]
    assert len(connections) == MAX_CONNECTIONS


def test_a_connection_that_waits_for_an_answer_is_not_closed(guests: list[Guest]) -> None:
    connections = full(guests, Stage.ANSWER)
    assert not connections.add(guests[-1].inner, 9.0)
    assert shut(guests) == []


def test_a_closed_connection_makes_room(guests: list[Guest]) -> None:
    connections = full(guests, Stage.ANSWER)
    connections.remove(guests[3].inner)
    assert connections.add(guests[-1].inner, 9.0)
    assert shut(guests) == []


def test_the_oldest_connections_time_out_first(guests: list[Guest]) -> None:
    connections = full(guests, Stage.REQUEST, Stage.ANSWER, Stage.SENDING)
    connections.shut_down_overdue(2.5 + MAX_SECONDS)
    assert shut(guests) == [0, 1, 2]
    assert len(connections) == MAX_CONNECTIONS - 3


def test_a_connection_that_was_closed_is_forgotten(guests: list[Guest]) -> None:
    connections = full(guests, Stage.REQUEST)
    connections.shut_down_overdue(1e9)
    for guest in guests:
        connections.set_stage(guest.inner, Stage.SENDING)
        connections.remove(guest.inner)
    assert len(connections) == 0


def test_closing_a_connection_that_its_peer_closed_raises_nothing(guests: list[Guest]) -> None:
    connections = full(guests, Stage.REQUEST)
    guests[0].inner.close()
    assert connections.add(guests[-1].inner, 9.0)
