"""Preemption of runs for waiting owners: fair shares, turns, priorities, no endless swapping."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.requests.place_shares import (
    KEEP,
    LOOK_AGAIN,
    PATIENCE,
    TURN,
    Decision,
    Held,
    Places,
    Wanted,
    decide,
)
from mlxpool.broker.requests.request import IDLE_RANK, Request, rank_of
from support.core_requests import new_request

NOW = 100.0
WORKER, OTHER = 1, 2
ANY = frozenset({WORKER, OTHER})
STREAM = rank_of(0, kept=False, idle=False)
JOB = rank_of(0, kept=True, idle=False)


def request(owner: str, arrival: int = 0, rank: int = STREAM, since: float = 0.0) -> Request:
    created = new_request(arrival.to_bytes(16, "big"), owner, arrival)
    created.rank, created.accepted_at = rank, since
    return created


def runs(
    owner: str, count: int, *, first: int = 0, rank: int = STREAM, since: float = 99.0
) -> list[Held]:
    """Makes runs of an owner in the first worker, oldest first."""
    return [Held(request(owner, first + n, rank), WORKER, since, proven=True) for n in range(count)]


def waits(
    owner: str,
    count: int = 1,
    *,
    rank: int = STREAM,
    since: float = 0.0,
    workers: frozenset[int] = ANY,
) -> list[Wanted]:
    return [Wanted(request(owner, 900 + n, rank, since), workers) for n in range(count)]


def decided(
    held: Iterable[Held],
    wanted: Iterable[Wanted],
    now: float = NOW,
    coming: Mapping[int, int] | None = None,
) -> Decision:
    held = list(held)
    counts = Counter(run.request.owner for run in held)
    return decide(held, list(wanted), counts, coming or {}, now)


def after(held: Iterable[Held], decision: Decision) -> Counter[str]:
    """Returns the number of sequences of each owner after the decision."""
    held = list(held)
    counts = Counter(run.request.owner for run in held)
    for given_up, taker in decision.gives:
        counts[given_up.owner] -= 1
        counts[taker] += 1
    return +counts


def givers(decision: Decision) -> list[tuple[str, int, str]]:
    return [(giver.owner, giver.arrival, taker) for giver, taker in decision.gives]


def test_an_owner_alone_gives_nothing_up() -> None:
    assert decided(runs("a", 8), waits("a", 8)) == Decision()


def test_a_request_takes_the_newest_place_of_the_owner_that_has_the_most() -> None:
    held = [*runs("a", 5), *runs("b", 3, first=10)]
    assert givers(decided(held, waits("c"))) == [("a", 4, "c")]


def test_owners_that_wait_for_more_get_equal_shares() -> None:
    assert after(runs("a", 8), decided(runs("a", 8), waits("b", 20))) == {"a": 4, "b": 4}
    both = [*waits("b", 20), *waits("c", 20)]
    assert after(runs("a", 8), decided(runs("a", 8), both)) == {"a": 3, "b": 3, "c": 2}


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.lists(st.integers(0, 12), min_size=6, max_size=6),
)
def test_nobody_at_or_below_an_equal_share_gives_up_a_place(
    held_of: list[int], wanted_of: list[int]
) -> None:
    """Only owners above an equal share give up sequences.

    Afterwards no waiting owner has fewer sequences than another owner by two or more.
    """
    held = [run for n, count in enumerate(held_of) for run in runs(f"{n}", count, first=20 * n)]
    wanted = [want for n, count in enumerate(wanted_of) for want in waits(f"{n}", count)]
    decision = decided(held, wanted)
    before, now = Counter(run.request.owner for run in held), after(held, decision)
    assert sum(now.values()) == len(held)
    demands = [had + more for had, more in zip_longest(held_of, wanted_of, fillvalue=0)]
    level = equal_share(len(held), demands)
    for owner in before:
        if now[owner] < before[owner]:
            assert before[owner] > level and now[owner] >= math.floor(level)
    taken = Counter(taker for _, taker in decision.gives)
    for n, count in enumerate(wanted_of):
        if taken[f"{n}"] < count and before:
            most = max((now[owner] for owner in before if owner != f"{n}"), default=0)
            assert now[f"{n}"] + 2 > most
    later = decided(held, wanted)
    assert givers(later) == givers(decision), "the same for the same"


def equal_share(places: int, demands: list[int]) -> float:
    """Returns the equal share of owners that want more, if each owner gets at most its demand."""
    left, open_ = float(places), sorted(demands)
    for number, demand in enumerate(open_):
        share = left / (len(open_) - number)
        if demand >= share:
            return share
        left -= demand
    return math.inf


def test_places_that_come_are_counted_first() -> None:
    assert not decided(runs("a", 8), waits("b"), coming={WORKER: 1}).gives
    assert len(decided(runs("a", 8), waits("b", 3), coming={WORKER: 1}).gives) == 2
    elsewhere = waits("b", workers=frozenset({WORKER}))
    assert len(decided(runs("a", 8), elsewhere, coming={OTHER: 3}).gives) == 1, "not for it"


def test_only_a_place_in_a_worker_that_may_have_the_request_is_taken() -> None:
    held = [*runs("a", 4), *(Held(request("a", 10 + n), OTHER, 99.0, True) for n in range(4))]
    here = waits("b", workers=frozenset({WORKER}))
    assert givers(decided(held, here)) == [("a", 3, "b")]


def test_a_request_waits_a_moment_before_it_takes_a_place() -> None:
    since = NOW - PATIENCE / 2
    assert decided(runs("a", 8), waits("b", since=since)) == Decision((), since + PATIENCE)
    assert decided(runs("a", 8), waits("b", since=since), since + PATIENCE).gives


def test_more_owners_than_places_have_turns() -> None:
    held = [*runs("a", 1, since=97.0), *runs("b", 1, first=1, since=98.5)]
    early = decided(held, waits("c"), 98.9)
    assert early == Decision((), 97.0 + TURN)
    assert givers(decided(held, waits("c", 2), 97.0 + TURN)) == [("a", 0, "c")]
    assert givers(decided(held, [*waits("c"), *waits("d")], 101.0)) == [
        ("a", 0, "c"),
        ("b", 1, "d"),
    ]


def test_an_owner_with_a_place_takes_no_turn_of_another() -> None:
    held = [*runs("a", 2, since=0.0), *runs("b", 1, first=5, since=0.0)]
    assert decided(held, waits("b")) == Decision()


def test_a_turn_is_not_over_before_it_has_brought_something() -> None:
    held = [Held(request("a"), WORKER, 0.0, proven=False)]
    assert decided(held, waits("b")) == Decision((), NOW + LOOK_AGAIN)
    held.append(Held(request("c", 1), WORKER, 50.0, proven=True))
    assert givers(decided(held, waits("b"))) == [("c", 1, "b")]


def test_a_job_takes_no_place_of_a_stream_and_an_idle_one_gives_up_first() -> None:
    assert not decided(runs("a", 8), waits("b", rank=JOB)).gives
    mixed = [*runs("a", 4), *runs("a", 4, first=10, rank=JOB)]
    assert givers(decided(mixed, waits("b", rank=JOB))) == [("a", 13, "b")]
    idle = [*runs("a", 1, rank=IDLE_RANK), *runs("a", 7, first=1)]
    assert givers(decided(idle, waits("b"))) == [("a", 0, "b")]


# ---- promised and kept places --------------------------------------------------------------------


@pytest.fixture
def places() -> Places:
    """Makes a table of four sequences: owner `a` has three, owner `b` has one.

    The sequence of `b` was taken from `a`.
    """
    table = Places()
    for _ in range(4):
        table.get("a")
    table.give("a", "b")
    return table


def test_a_place_that_was_taken_is_promised_until_it_is_given(places: Places) -> None:
    assert places.held == {"a": 3} and places.promised == {"b": 1}
    places.get("b")
    assert places.held == {"a": 3, "b": 1} and not places.promised


def test_a_place_that_was_taken_for_an_owner_is_kept_for_it_for_a_while(places: Places) -> None:
    places.get("b")
    places.leave("b", NOW)
    assert places.kept_from("a", NOW) == ["b"] and places.kept_until(NOW) == NOW + KEEP
    assert not places.kept_from("b", NOW) and not places.kept_from("new", NOW)
    places.get("b")
    assert not places.kept_from("a", NOW), "b has it again"
    places.leave("b", NOW + 5)
    assert places.kept_from("a", NOW + 5) == ["b"], "and it is kept again"
    assert not places.kept_from("a", NOW + 5 + KEEP)
    assert math.isinf(places.kept_until(NOW + 5 + KEEP))


def test_a_place_that_nobody_gave_up_is_not_kept(places: Places) -> None:
    places.leave("a", NOW)
    assert not places.kept_from("c", NOW) and math.isinf(places.kept_until(NOW))
    places.get("b")
    places.get("b")
    places.leave("b", NOW)
    assert math.isinf(places.kept_until(NOW)), "b has the one that was taken for it"


def test_a_place_that_is_given_up_in_turn_is_not_kept(places: Places) -> None:
    places.get("b")
    places.give("b", "c")
    assert places.promised == {"c": 1} and not places.held["b"]
    assert math.isinf(places.kept_until(NOW))
    places.break_promise("c")
    assert not places.promised
