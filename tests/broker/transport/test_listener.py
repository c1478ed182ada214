"""If descriptors are scarce, idle connections are closed first, the newest before the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mlxpool.broker.transport import listener as module
from mlxpool.broker.transport.listener import BURST, Listener, accepted, inode_of, shut_down
from mlxpool.common.transport import sockets
from support.pool import until

LIMIT = 300
IDLE_BOUND = int(module.UNBIND_ABOVE * LIMIT) - BURST


class Front:
    """A ROUTER with its listener, and DEALERs that connect in turn and never reconnect."""

    def __init__(self, path: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = sockets.ipc(path, "front")
        self.router = sockets.router(self.context, self.endpoint, backlog=64, domain="")
        self.listener = Listener(self.router, self.endpoint, LIMIT)
        self.dealers: list[zmq.Socket[bytes]] = []

    def connect(self, count: int) -> list[int]:
        """Connects `count` DEALERs. Returns their descriptors, in the order of acceptance."""
        descriptors: list[int] = []
        for _ in range(count):
            before = set(self.accepted())
            dealer = self.context.socket(zmq.DEALER)
            self.dealers.append(dealer)
            dealer.setsockopt(zmq.RECONNECT_IVL, -1)
            dealer.connect(self.endpoint)
            until(lambda: len(self.accepted()) > len(before), "it is accepted")  # noqa: B023
            descriptors += set(self.accepted()) - before
            until(lambda: bool(self.listener.monitor.poll(0)), "the event is there")
            self.listener.on_accepted(0.0)
        return descriptors

    def accepted(self) -> list[int]:
        return [descriptor for descriptor, _ in accepted({self.endpoint})]

    def close(self) -> None:
        self.listener.close()
        for each in (*self.dealers, self.router):
            each.close(linger=0)
        self.context.term()


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    opened = Front(tmp_path)
    yield opened
    opened.close()


def test_the_newest_idle_connections_are_ended_first(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "count_open", lambda: 0)
    descriptors = front.connect(36)
    busy = {descriptors[0], descriptors[35]}
    front.listener.busy = lambda: busy
    monkeypatch.setattr(module, "count_open", lambda: IDLE_BOUND)
    front.listener.check(10.0)
    assert len(front.accepted()) == 36  # the bound is not exceeded yet
    monkeypatch.setattr(module, "count_open", lambda: IDLE_BOUND + 1)
    front.listener.check(20.0)
    kept = {*descriptors[:4], descriptors[35]}
    until(lambda: set(front.accepted()) == kept, "the 31 newest idle ones are closed")
    assert not front.listener.unbound


def test_the_front_is_unbound_when_ending_idle_connections_does_not_suffice(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.connect(1)
    monkeypatch.setattr(module, "count_open", lambda: 241)
    front.listener.check(10.0)
    assert front.listener.unbound and front.listener.times_unbound == 1
    monkeypatch.setattr(module, "count_open", lambda: 100)
    front.listener.check(20.0)
    assert not front.listener.unbound
    front.connect(1)


# ---- descriptors ---------------------------------------------------------------------------------
# Connections are closed by their descriptors, whose numbers are reused.


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    """The descriptor number may already belong to a newer connection, which must stay open."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
        listener.bind(path)
        listener.listen()
        gone = inode_of(listener.fileno())
        peer.connect(path)
        ours, _ = listener.accept()
        with ours:
            shut_down(ours.fileno(), gone)
            ours.sendall(b"x")
            assert peer.recv(1) == b"x"
            shut_down(ours.fileno(), inode_of(ours.fileno()))
            assert peer.recv(1) == b""


def test_what_is_no_connection_is_left_alone(tmp_path: Path) -> None:
    shut_down(-1, inode_of(-1))
    with (tmp_path / "file").open("w") as file:
        shut_down(file.fileno(), inode_of(file.fileno()))
        file.write("x")
