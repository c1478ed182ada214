"""The peers of a real ROUTER: who they are, what happens when one is full or gone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from mlxpool.broker.transport import peers as module
from mlxpool.broker.transport.peers import Peer, Peers
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.transport import sockets

PATIENCE = 30  # seconds


class Wire:
    """A ROUTER and the DEALERs that talk to it, in one process."""

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
        """A DEALER of this name: libzmq ignores one while an ended connection has the name."""
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
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:  # short: its path has to fit
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
    one, two = wires.dealer(), wires.dealer()
    first, second = wires.met(one), wires.met(two, now=2.0)
    assert first.number != second.number
    assert (first.heard_at, second.heard_at) == (1.0, 2.0)
    assert wires.peers.send(second.number, [b"for", b"two"])
    assert two.poll(PATIENCE * 1000) and two.recv_multipart() == [b"for", b"two"]
    assert wires.met(one, now=5.0) is first
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
    """A worker that is sent work after its end has said before how it ended."""
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
    """Send numbered messages until the peer takes no more; how many there were."""
    count = 0
    while not peer.backlog:
        assert wires.peers.send(peer.number, [str(count).encode(), bytes(size)])
        count += 1
    assert wires.peers.full == {peer.number}
    return count


def test_a_full_peer_queues_and_is_retried_in_order(wires: Wire) -> None:
    dealer = wires.dealer(receive_limit=2)
    peer = wires.met(dealer)
    count = fill(wires, peer)
    for _ in range(5):
        assert wires.peers.send(peer.number, [str(count).encode(), b"late"])
        count += 1
    assert len(peer.backlog) == 6
    assert peer.backlog_bytes == sum(sum(map(len, parts)) for parts in peer.backlog)
    got: list[int] = []
    end = time.monotonic() + PATIENCE
    while len(got) < count:
        assert time.monotonic() < end
        assert wires.peers.retry() == []
        while dealer.poll(10):
            got.append(int(dealer.recv_multipart()[0]))
    assert got == list(range(count))
    assert not wires.peers.full and peer.backlog_bytes == 0


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
    monkeypatch.setattr(module, "MAX_BACKLOG", peer.backlog_bytes + 10)
    assert wires.peers.send(peer.number, [bytes(10)])
    assert wires.peers.send(peer.number, [b"x"]) is False
    assert not wires.peers.by_number and not wires.peers.full
    assert wires.peers.retry() == []


@pytest.mark.parametrize("keep_gone", [False, True])
def test_a_full_peer_that_goes_is_reported_by_the_retry(keep_gone: bool) -> None:
    with made(keep_gone=keep_gone) as wires:
        dealer = wires.dealer(receive_limit=2)
        peer = wires.met(dealer)
        fill(wires, peer)
        dealer.close(linger=0)
        gone: list[int] = []

        def told() -> bool:
            wires.router.poll(5)  # as the broker's loop does: libzmq learns of ends in polls
            gone.extend(wires.peers.retry())
            return bool(gone)

        until(told)
        assert gone == [peer.number]
        assert not wires.peers.full and list(wires.peers.by_number) == gone * keep_gone
        assert wires.peers.retry() == [] and not peer.backlog_bytes * keep_gone


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
    """Until its end is told; others of the workers' socket that have gone are swept."""
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
    found: list[Peer] = []

    def is_found() -> bool:
        ended = wires.peers.ended(descriptor)
        found.extend([] if ended is None else [ended])
        return bool(found)

    until(is_found)
    assert found == [peer] and peer.number not in wires.peers.by_number
    assert wires.peers.ended(descriptor) is None
    again = wires.met(wires.dealer())  # it may have the same descriptor
    assert wires.peers.ended(again.descriptor) is None and again.number in wires.peers.by_number
