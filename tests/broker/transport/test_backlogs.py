"""Backlogs of slow peers: the times of send retries, and the memory counted for a backlog."""

from __future__ import annotations

import itertools
import math

from mlxpool.broker.transport.peers import FIRST_RETRY, MAX_RETRY, PART_BYTES, Backlogs, size_of


def tries(backlogs: Backlogs, end: float) -> list[float]:
    """Returns the times, up to `end`, of the send retries for a peer that reads nothing."""
    times = []
    now = 0.0
    while (now := max(now, backlogs.next_wake())) < end:
        number = backlogs.due(now)
        if number is not None:
            times.append(now)
            backlogs.put_back(number, now, progress=False, more=False)
    return times


def test_a_peer_that_takes_nothing_is_tried_less_and_less_often() -> None:
    backlogs = Backlogs()
    backlogs.add(1, 10)
    times = tries(backlogs, 5.0)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert abs(times[0] - FIRST_RETRY) < 1e-9 and abs(gaps[0] - FIRST_RETRY) < 1e-9
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(gaps))
    assert abs(gaps[-1] - MAX_RETRY) < 1e-9 and len(times) < 16


def test_a_frame_of_a_peer_makes_its_next_try_due() -> None:
    backlogs = Backlogs()
    backlogs.add(1, 10)
    tries(backlogs, 5.0)
    assert backlogs.due(5.0) is None
    backlogs.heard(1, 5.0)
    assert backlogs.due(5.0) == 1
    backlogs.put_back(1, 5.0, progress=False, more=False)
    assert backlogs.next_wake() == 5.0 + FIRST_RETRY, "and the waits are short again"


def test_a_peer_that_sends_often_keeps_its_turn() -> None:
    """Frames from a peer do not postpone the next attempt to send to this peer."""
    backlogs = Backlogs()
    for number in range(1, 101):
        backlogs.add(number, 10)
    backlogs.due(0.0)
    tried, now = [], FIRST_RETRY
    for _ in range(200):  # passes with one try each, while all peers send
        now += FIRST_RETRY
        backlogs.heard(100, now)
        peer = backlogs.due(now)
        assert peer is not None
        tried.append(peer)
        backlogs.put_back(peer, now, progress=False, more=False)
        backlogs.heard(peer, now)
    assert tried.count(100) == 2


def test_a_peer_with_a_small_backlog_is_spared() -> None:
    sizes = {1: 49, 2: 150, 3: 101}  # the mean is 100
    backlogs = Backlogs()
    for number, size in sizes.items():
        backlogs.add(number, size)
    assert backlogs.stuck_longest(sizes.__getitem__) == 2, "1 holds less than half the mean"
    sizes[1] += 1
    backlogs.add(1, 1)
    sizes[3] -= 1
    backlogs.sent(1)
    assert backlogs.stuck_longest(sizes.__getitem__) == 1


def test_a_peer_that_has_progressed_is_no_longer_the_one_that_is_stuck_longest() -> None:
    backlogs = Backlogs(max_bytes=25)
    for number in (1, 2):
        backlogs.add(number, 10)
    sizes = {1: 10, 2: 10}
    assert backlogs.stuck_longest(sizes.__getitem__) == 1 and not backlogs.exceeded
    backlogs.due(0.0)
    assert backlogs.due(FIRST_RETRY) == 1
    backlogs.sent(5)
    backlogs.put_back(1, FIRST_RETRY, progress=True, more=True)
    sizes[1] = 5
    assert backlogs.stuck_longest(sizes.__getitem__) == 2
    assert backlogs.due(FIRST_RETRY) == 2, "others are tried before it is again"
    backlogs.put_back(2, FIRST_RETRY, progress=False, more=False)
    assert backlogs.due(FIRST_RETRY) == 1
    backlogs.add(2, 11)
    assert backlogs.bytes == 26 and backlogs.exceeded
    backlogs.drop(2, 21)
    assert backlogs.bytes == 5 and list(backlogs) == [1]


def test_without_full_peers_nothing_is_due() -> None:
    backlogs = Backlogs()
    assert backlogs.next_wake() == math.inf and backlogs.due(1e9) is None
    backlogs.add(1, 10)
    backlogs.drop(1, 10)
    assert backlogs.due(1e9) is None and backlogs.next_wake() == math.inf and not backlogs


def test_small_parts_count_with_the_memory_that_they_take() -> None:
    assert size_of([b"", b"abc"]) == 3 + 2 * PART_BYTES
