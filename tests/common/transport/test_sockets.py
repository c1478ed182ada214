"""The options and the endpoints of ZeroMQ sockets."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from mlxpool.common.protocol.frames import MAX_FRAME
from mlxpool.common.transport import sockets


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield zmq_context
    zmq_context.destroy(linger=0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as path:  # a socket's path must be short
        yield Path(path)


def test_the_endpoint_of_a_run_directory(folder: Path) -> None:
    assert sockets.ipc(folder, "front") == f"ipc://{folder}/front.ipc"


def test_a_path_may_be_just_so_long(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
    long = folder / ("x" * (sockets.MAX_PATH - len(str(folder)) - len("//a.ipc")))
    long.mkdir()
    endpoint = sockets.ipc(long, "a")
    assert len(endpoint) == sockets.MAX_PATH + len("ipc://")
    sockets.router(context, endpoint).close()
    with pytest.raises(ValueError, match=r"108 bytes, at most 107; use a shorter --run-dir"):
        sockets.ipc(long, "ab")


def test_bytes_count_not_characters(folder: Path) -> None:
    with pytest.raises(ValueError, match="at most 107"):
        sockets.ipc(folder / ("é" * 50), "front")


def test_only_we_may_connect(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
    before = os.umask(0)
    try:
        socket = sockets.router(context, sockets.ipc(folder, "a"))
        assert os.umask(0) == 0, "the process's own umask is as before"
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "a.ipc").stat().st_mode) & 0o077 == 0
    socket.close()


def test_a_bind_error_names_the_endpoint(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path
) -> None:
    endpoint = sockets.ipc(folder / "missing", "a")
    with pytest.raises(OSError, match="cannot bind") as caught:
        sockets.router(context, endpoint)
    assert endpoint in str(caught.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_could_not_be_bound_is_closed(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[zmq.Socket[bytes]] = []
    make = context.socket

    def remember(kind: int) -> zmq.Socket[bytes]:
        opened.append(make(kind))
        return opened[-1]

    monkeypatch.setattr(context, "socket", remember)
    with pytest.raises(OSError):
        sockets.router(context, sockets.ipc(folder / "missing", "a"))
    try:
        assert all(socket.closed for socket in opened)
    finally:
        for socket in opened:
            socket.close(linger=0)


@pytest.mark.parametrize("endpoint", ["nonsense", "carrier://pigeon", "tcp://"])
def test_a_connect_error_names_the_endpoint(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    with pytest.raises(OSError, match="cannot connect to") as caught:
        sockets.dealer(context, endpoint)
    assert endpoint in str(caught.value)


def test_bounds_are_set(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
    endpoint = sockets.ipc(folder, "a")
    for socket in (sockets.router(context, endpoint), sockets.dealer(context, endpoint)):
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 1000
        assert socket.getsockopt(zmq.LINGER) == sockets.LINGER_MS
        assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME
        socket.close()
