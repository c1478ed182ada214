"""What is made of handshakes that fail."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mlxpool.common.transport.handshake import HOPELESS_FAILURES, Handshake

BROKEN_OFF = HOPELESS_FAILURES + 2


@pytest.fixture
def listeners() -> Iterator[dict[str, socket.socket]]:
    """One of each transport; they accept and hang up."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        path = Path(folder) / "a.ipc"
        unix, tcp = socket.socket(socket.AF_UNIX), socket.socket()
        unix.bind(str(path))
        tcp.bind(("127.0.0.1", 0))
        made = {f"ipc://{path}": unix, f"tcp://127.0.0.1:{tcp.getsockname()[1]}": tcp}
        for one in made.values():
            one.listen()
        yield made
        for one in made.values():
            one.close()


def hang_up(listener: socket.socket) -> None:
    """So many times, after the first bytes of the other side."""
    for _ in range(BROKEN_OFF):
        peer, _ = listener.accept()
        with peer:
            peer.recv(64)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_keys_are_blamed_where_there_are_keys(
    listeners: dict[str, socket.socket], transport: str
) -> None:
    """On ipc somebody may be short of descriptors: the next try may come through."""
    endpoint = next(one for one in listeners if one.startswith(transport))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialler = context.socket(zmq.DEALER)
    dialler.reconnect_ivl = 10
    handshake = Handshake(dialler, endpoint)
    thread = threading.Thread(target=hang_up, args=(listeners[endpoint],))
    thread.start()
    dialler.connect(endpoint)
    thread.join()
    while transport == "tcp" and not handshake.hopeless:
        handshake.monitor.poll(1000)
        assert not handshake.succeeded()
    assert not handshake.succeeded()
    assert handshake.hopeless == ("without a key" in handshake.trouble) == (transport == "tcp")
    handshake.close()
    context.destroy(linger=0)
