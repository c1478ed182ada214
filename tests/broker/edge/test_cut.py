"""Connections are ended by their descriptors, whose numbers are given out again."""

from __future__ import annotations

import socket
from pathlib import Path

from mlxpool.broker.edge.memory_guard import cut
from mlxpool.broker.edge.peers import inode_of


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
            cut(ours.fileno(), gone)
            ours.sendall(b"x")
            assert peer.recv(1) == b"x"
            cut(ours.fileno(), inode_of(ours.fileno()))
            assert peer.recv(1) == b""


def test_what_is_no_connection_is_left_alone(tmp_path: Path) -> None:
    cut(-1, inode_of(-1))
    with (tmp_path / "file").open("w") as file:
        cut(file.fileno(), inode_of(file.fileno()))
        file.write("x")
