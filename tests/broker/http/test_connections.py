"""Who of the HTTP server's connections gives way to whom."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mlxpool.broker.http.connections import AT_ONCE, LONGEST, Stage, Visits


class Guest:
    """One end is with the server; the other sees whether it was shut."""

    def __init__(self) -> None:
        self.inner, self.outer = socket.socketpair()
        self.outer.settimeout(60)
        self.outer.setblocking(False)

    @property
    def shut(self) -> bool:
        try:
            return self.outer.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def guests() -> Iterator[list[Guest]]:
    """One more than there is room for."""
    with ExitStack() as stack:
        made = [Guest() for _ in range(AT_ONCE + 1)]
        for guest in made:
            stack.enter_context(guest.inner)
            stack.enter_context(guest.outer)
        yield made


def full(guests: list[Guest], *stages: Stage) -> Visits:
    """All but the last have come, a second apart, and are so far; the rest as the last named."""
    visits = Visits()
    for place, guest in enumerate(guests[:-1]):
        assert visits.enter(guest.inner, float(place))
        visits.turn(guest.inner, stages[min(place, len(stages) - 1)])
    return visits


def shut(guests: list[Guest]) -> list[int]:
    return [place for place, guest in enumerate(guests) if guest.shut]


def test_there_is_room_for_some(guests: list[Guest]) -> None:
    assert len(full(guests, Stage.ASKING)) == AT_ONCE
    assert shut(guests) == []


@pytest.mark.parametrize(
    ("stages", "gives_way"),
    [
        ((Stage.ASKING,), 0),
        ((Stage.TAKING,), 0),
        ((Stage.MAKING, Stage.ASKING), 1),
        ((Stage.MAKING, Stage.TAKING), 1),
        ((Stage.TAKING, Stage.MAKING, Stage.ASKING), 2),
        ((Stage.MAKING, Stage.MAKING, Stage.TAKING, Stage.MAKING), 2),
    ],
)
def test_the_oldest_idle_one_gives_way(
    guests: list[Guest], stages: tuple[Stage, ...], gives_way: int
) -> None:
    visits = full(guests, *stages)
    assert visits.enter(guests[-1].inner, 9.0)
    assert shut(guests) == [gives_way]
    assert len(visits) == AT_ONCE


def test_nobody_gives_way_who_waits_for_us(guests: list[Guest]) -> None:
    visits = full(guests, Stage.MAKING)
    assert not visits.enter(guests[-1].inner, 9.0)
    assert shut(guests) == []


def test_one_that_leaves_makes_room(guests: list[Guest]) -> None:
    visits = full(guests, Stage.MAKING)
    visits.leave(guests[3].inner)
    assert visits.enter(guests[-1].inner, 9.0)
    assert shut(guests) == []


def test_time_is_up_for_those_that_came_first(guests: list[Guest]) -> None:
    visits = full(guests, Stage.ASKING, Stage.MAKING, Stage.TAKING)
    visits.hurry(2.5 + LONGEST)
    assert shut(guests) == [0, 1, 2]
    assert len(visits) == AT_ONCE - 3


def test_what_was_shut_is_known_no_more(guests: list[Guest]) -> None:
    visits = full(guests, Stage.ASKING)
    visits.hurry(1e9)
    for guest in guests:
        visits.turn(guest.inner, Stage.TAKING)
        visits.leave(guest.inner)
    assert len(visits) == 0


def test_a_peer_that_went_first(guests: list[Guest]) -> None:
    visits = full(guests, Stage.ASKING)
    guests[0].inner.close()
    assert visits.enter(guests[-1].inner, 9.0)
