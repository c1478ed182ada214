"""Connections are ended by their descriptors, whose numbers are reused."""

from __future__ import annotations

import socket
from pathlib import Path

from mlxpool.broker.transport.listener import inode_of, shut_down


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    """Nobody tells of a connection's end, and the next one may get its number."""
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
