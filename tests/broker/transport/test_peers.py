"""The peers of a real ROUTER: identities, full peers, and peers that have left."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from mlxpool.broker.transport import peers as module
from mlxpool.broker.transport.listener import has_ended
from mlxpool.broker.transport.peers import FIRST_RETRY, MAX_RETRY, MAX_SENDS, Peer, Peers, size_of
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.transport import sockets

PATIENCE = 200  # seconds; only a failing test waits so long


class Wire:
    """A ROUTER and its DEALERs, in one process."""

    def __init__(self, folder: Path, *, keep_gone: bool = False) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = sockets.ipc(folder, "t")
        self.router = sockets.router(self.context, self.endpoint)
        self.peers = Peers(self.router, keep_gone=keep_gone)
        self.dealers: list[zmq.Socket[bytes]] = []

    def dealer(self, receive_limit: int = 0, name: bytes = b"") -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        if name:
            socket.setsockopt(zmq.ROUTING_ID, name)
        if receive_limit:
            socket.setsockopt(zmq.RCVHWM, receive_limit)
            socket.setsockopt(zmq.RCVBUF, 4096)
        socket.connect(self.endpoint)
        self.dealers.append(socket)
        return socket

    def met(self, dealer: zmq.Socket[bytes], now: float = 1.0) -> Peer:
        dealer.send_multipart([b"hi"])
        peer, parts = self.next(now)
        assert parts == [b"hi"]
        return peer

    def met_as(self, name: bytes) -> tuple[zmq.Socket[bytes], Peer]:
        """Connects a DEALER of this identity; retries until libzmq has dropped an older one."""
        for _ in range(10 * PATIENCE):
            dealer = self.dealer(name=name)
            dealer.send_multipart([b"hi"])
            if self.router.poll(100):
                return dealer, self.next()[0]
            dealer.close(linger=0)
        raise AssertionError("the ROUTER takes no connection of this name")

    def next(self, now: float = 1.0) -> tuple[Peer, list[bytes]]:
        assert self.router.poll(PATIENCE * 1000)
        received = self.peers.receive(now)
        assert received is not None
        return received

    def close(self) -> None:
        for socket in (*self.dealers, self.router):
            socket.close(linger=0)
        self.context.term()


@contextmanager
def made(*, keep_gone: bool = False) -> Iterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:  # a socket's path must be short
        wires = Wire(Path(folder), keep_gone=keep_gone)
        try:
            yield wires
        finally:
            wires.close()


@pytest.fixture
def wires() -> Iterator[Wire]:
    with made() as wires:
        yield wires


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.005)


def gone(wires: Wire, peer: Peer) -> bool:
    return not wires.peers.send(peer.number, [b"x"])


def test_receive_returns_none_without_a_message(wires: Wire) -> None:
    assert wires.peers.receive(1.0) is None


def test_each_connection_gets_a_number_and_its_answers(wires: Wire) -> None:
    dealer, other = wires.dealer(), wires.dealer()
    first, second = wires.met(dealer), wires.met(other, now=2.0)
    assert first.number != second.number
    assert (first.heard_at, second.heard_at) == (1.0, 2.0)
    assert wires.peers.send(second.number, [b"for", b"two"])
    assert other.poll(PATIENCE * 1000) and other.recv_multipart() == [b"for", b"two"]
    assert wires.met(dealer, now=5.0) is first
    assert first.heard_at == 5.0


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the kernel's word is Linux's")
def test_the_owner_of_a_peer_is_the_uid_that_the_kernel_gives(wires: Wire) -> None:
    assert wires.met(wires.dealer()).owner == f"uid:{os.getuid()}"


def test_a_send_to_an_unknown_number_fails(wires: Wire) -> None:
    assert wires.peers.send(99, [b"x"]) is False


def test_a_peer_that_closed_is_reported_gone_and_forgotten(wires: Wire) -> None:
    dealer = wires.dealer()
    peer = wires.met(dealer)
    dealer.close(linger=0)
    until(lambda: not wires.peers.send(peer.number, [b"x"]))
    assert not wires.peers.by_number and not wires.peers.by_name
    assert wires.peers.send(peer.number, [b"x"]) is False


@pytest.mark.parametrize("keep_gone", [False, True])
def test_the_last_messages_of_a_peer_found_gone_are_received(keep_gone: bool) -> None:
    """The last messages of a gone peer are received if gone peers are kept, else dropped."""
    with made(keep_gone=keep_gone) as wires:
        dealer = wires.dealer()
        peer = wires.met(dealer)
        for _ in range(3):
            dealer.send_multipart([b"last"])
        dealer.close(linger=PATIENCE * 1000)
        until(lambda: not wires.peers.send(peer.number, [b"x"]))
        assert peer.gone == keep_gone
        for _ in range(3):
            assert (wires.next()[0].number == peer.number) == keep_gone
        assert not wires.peers.send(peer.number, [b"x"])
        wires.peers.forget(peer.number)
        assert peer.number not in wires.peers.by_number


def test_a_number_is_never_used_again(wires: Wire) -> None:
    dealer = wires.dealer()
    first = wires.met(dealer)
    wires.peers.forget(first.number)
    wires.peers.forget(first.number)
    assert wires.met(dealer).number > first.number


def fill(wires: Wire, peer: Peer, size: int = 4096) -> int:
    """Sends numbered messages until the peer is full. Returns their number."""
    count = 0
    while not peer.backlog:
        assert wires.peers.send(peer.number, [str(count).encode(), bytes(size)])
        count += 1
    assert peer.number in wires.peers.full
    return count


def test_a_full_peer_queues_and_is_retried_in_order(wires: Wire) -> None:
    dealer = wires.dealer(receive_limit=2)
    peer = wires.met(dealer)
    count = fill(wires, peer)
    for _ in range(5):
        assert wires.peers.send(peer.number, [str(count).encode(), b"late"])
        count += 1
    assert len(peer.backlog) == 6
    assert peer.backlog_bytes == wires.peers.full.bytes == sum(map(size_of, peer.backlog))
    got: list[int] = []
    end = time.monotonic() + PATIENCE
    while len(got) < count:
        assert time.monotonic() < end
        assert wires.peers.retry(time.monotonic()) == []
        while dealer.poll(10):
            got.append(int(dealer.recv_multipart()[0]))
    assert got == list(range(count))
    assert not wires.peers.full and peer.backlog_bytes == wires.peers.full.bytes == 0


def test_one_full_peer_does_not_hold_up_another(wires: Wire) -> None:
    slow, quick = wires.dealer(receive_limit=2), wires.dealer()
    peer, other = wires.met(slow), wires.met(quick)
    fill(wires, peer)
    assert wires.peers.send(other.number, [b"x"])
    assert not other.backlog
    assert quick.poll(PATIENCE * 1000)


def test_a_backlog_is_bounded(wires: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = wires.met(wires.dealer(receive_limit=2))
    fill(wires, peer)
    monkeypatch.setattr(module, "MAX_BACKLOG", peer.backlog_bytes + size_of([bytes(10)]))
    assert wires.peers.send(peer.number, [bytes(10)])
    assert wires.peers.send(peer.number, [b"x"]) is False
    assert wires.peers.overflowed(peer.number)
    assert not wires.peers.by_number and not wires.peers.full and not wires.peers.full.bytes
    assert wires.peers.retry(1e9) == []


def test_what_waits_for_all_is_bounded_and_who_is_stuck_longest_is_given_up(wires: Wire) -> None:
    stuck, last = (wires.met(wires.dealer(receive_limit=2)) for _ in range(2))
    for peer in (stuck, last):
        fill(wires, peer)
    wires.peers.full.max_bytes = wires.peers.full.bytes
    assert wires.peers.send(last.number, [b"one too many"])
    assert stuck.number not in wires.peers.by_number and list(wires.peers.full) == [last.number]
    assert wires.peers.full.bytes == last.backlog_bytes
    assert wires.peers.next_retry() == 0.0, "its end is to be reported"
    assert wires.peers.retry(0.0) == [stuck.number]
    wires.peers.full.max_bytes = 0
    assert wires.peers.send(last.number, [b"x"]) is False
    assert not wires.peers.overflowed(last.number), "its own backlog was small"
    assert not wires.peers.full and not wires.peers.full.bytes and wires.peers.retry(0.0) == []
    assert wires.peers.given_up == 2
    # The connections of both peers were closed as well, so that libzmq holds no messages for them.
    until(lambda: all(has_ended(peer.descriptor, peer.inode) for peer in (stuck, last)))


class Crowd(Peers):
    """Full peers without sockets; peers in `reading` accept messages."""

    def __init__(self, count: int, *, messages: int = 1) -> None:
        self.sends = 0
        self.reading: set[int] = set()
        super().__init__(cast(Any, None))
        for number in range(1, count + 1):
            self.by_number[number] = peer = Peer(b"%d" % number, number, 0.0, "")
            self.by_name[peer.name] = peer
            for _ in range(messages):
                self._queue(peer, [b"x"])

    def _try(self, peer: Peer, parts: list[bytes]) -> bool | None:
        self.sends += 1
        return True if peer.number in self.reading else None


def test_one_turn_tries_a_bounded_number_of_full_peers() -> None:
    crowd = Crowd(4000)
    most = 0
    for turn in range(10_000):
        before = crowd.sends
        crowd.retry(turn * 0.001)
        most = max(most, crowd.sends - before)
    assert most == MAX_SENDS
    # Each peer gets, in 10 s: seven tries until the longest pause, then a try every 0.64 s.
    assert crowd.sends < 4000 * 24


def test_a_peer_that_reads_again_is_served_among_thousands_that_do_not() -> None:
    crowd = Crowd(4000)
    for turn in range(5000):
        crowd.retry(turn * 0.001)
    crowd.reading.add(77)
    crowd.full.heard(77, 5.0)
    before = crowd.sends
    while 77 in crowd.full:
        crowd.retry(5.0)
    assert crowd.sends - before <= 4001  # one try for each peer that was due earlier
    later = 5.0
    crowd.reading.add(78)  # the peer is silent, so its next try is at its due time
    while 78 in crowd.full:
        later += 0.001
        crowd.retry(later)
    assert later < 5.0 + 2 * MAX_RETRY


def test_a_peer_that_takes_something_is_not_the_one_that_is_stuck_longest() -> None:
    crowd = Crowd(3, messages=2 * MAX_SENDS)
    crowd.retry(0.0)
    crowd.reading.add(1)
    crowd.retry(FIRST_RETRY)
    assert list(crowd.full) == [2, 3, 1]
    crowd.full.max_bytes = crowd.full.bytes
    crowd.send(3, [b"x"])
    assert crowd.retry(FIRST_RETRY) == [2] and list(crowd.full) == [3, 1]


def test_backlogs_of_others_end_no_peer_for_which_little_waits() -> None:
    crowd = Crowd(3)
    for number in (2, 3, 2):
        crowd.send(number, [bytes(1000)])
    crowd.full.max_bytes = crowd.full.bytes
    assert crowd.send(3, [bytes(1000)])
    assert crowd.retry(0.0) == [2] and list(crowd.full) == [1, 3]


def test_a_long_backlog_is_sent_in_portions() -> None:
    """One turn sends at most MAX_SENDS messages, so a peer that reads quickly delays no other."""
    crowd = Crowd(2, messages=3 * MAX_SENDS)
    crowd.reading |= {1, 2}
    now, turns = FIRST_RETRY, 0
    crowd.retry(0.0)
    while crowd.full:
        before = crowd.sends
        assert crowd.next_retry() <= now
        crowd.retry(now)
        assert crowd.sends - before == MAX_SENDS
        turns += 1
    assert turns == 6 and crowd.full.bytes == 0 and crowd.next_retry() == math.inf


@pytest.mark.parametrize("keep_gone", [False, True])
def test_a_full_peer_that_goes_is_reported_by_the_retry(keep_gone: bool) -> None:
    with made(keep_gone=keep_gone) as wires:
        dealer = wires.dealer(receive_limit=2)
        peer = wires.met(dealer)
        fill(wires, peer)
        dealer.close(linger=0)
        gone: list[int] = []

        def told() -> bool:
            wires.router.poll(5)  # as the broker's loop does: libzmq notices ends in polls
            gone.extend(wires.peers.retry(time.monotonic()))
            return bool(gone)

        until(told)
        assert gone == [peer.number]
        assert not wires.peers.full and list(wires.peers.by_number) == gone * keep_gone
        assert (
            wires.peers.retry(1e9) == [] and not peer.backlog_bytes and not wires.peers.full.bytes
        )


def test_a_peer_that_comes_back_under_its_name_is_not_gone() -> None:
    with made(keep_gone=True) as wires:
        for _ in range(2):
            dealer, peer = wires.met_as(b"own")
            assert wires.peers.send(peer.number, [b"x"])
            assert not peer.gone
            dealer.close(linger=0)
            until(partial(gone, wires, peer))
            assert peer.gone


def test_only_a_worker_found_gone_is_remembered() -> None:
    """The worker is remembered until its end is reported; other peers that left are forgotten."""
    with made(keep_gone=True) as wires:
        dealers = [wires.dealer() for _ in range(3)]
        worker, stranger, alive = (wires.met(dealer) for dealer in dealers)
        for dealer, peer in zip(dealers[:2], (worker, stranger), strict=True):
            dealer.close(linger=0)
            until(partial(gone, wires, peer))
        sessions = WorkerSessions(wires.peers)
        sessions.open("m/0", worker.number)
        sessions.sweep()
        assert list(wires.peers.by_number) == [worker.number, alive.number]
        sessions.release("m/0")
        sessions.sweep()
        assert list(wires.peers.by_number) == [alive.number]


def test_the_peer_of_a_connection_that_has_ended_is_found_and_forgotten(wires: Wire) -> None:
    dealer = wires.dealer()
    peer = wires.met(dealer)
    descriptor = peer.descriptor
    assert wires.peers.ended(descriptor) is None and peer.number in wires.peers.by_number
    dealer.close(linger=0)
    peers: list[Peer] = []

    def is_found() -> bool:
        ended = wires.peers.ended(descriptor)
        peers.extend([] if ended is None else [ended])
        return bool(peers)

    until(is_found)
    assert peers == [peer] and peer.number not in wires.peers.by_number
    assert wires.peers.ended(descriptor) is None
    again = wires.met(wires.dealer())  # the next connection may have the same descriptor
    assert wires.peers.ended(again.descriptor) is None and again.number in wires.peers.by_number
