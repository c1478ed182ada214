"""Our ends of accepted connections, found and ended by their file descriptors.

libzmq offers no way to end one connection, so the broker shuts down the socket below it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator


def inode_of(descriptor: int) -> int:
    """Distinguishes a descriptor from a later one with the same number; -1: there is none."""
    try:
        return os.fstat(descriptor).st_ino if descriptor >= 0 else -1
    except OSError:
        return -1


def has_ended(descriptor: int, inode: int) -> bool:
    """Whether the connection with this descriptor is closed, by us or by its peer."""
    if inode_of(descriptor) != inode:
        return True
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return True
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.detach()


def count_open() -> int:
    """Descriptors that this process has open."""
    return len(os.listdir("/dev/fd"))


def shut_down(descriptor: int, inode: int) -> None:
    """End the connection with this descriptor; nothing if it has closed or is another file now."""
    if descriptor < 0 or inode_of(descriptor) != inode:
        return
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        if _endpoints(connection):
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer closed it meanwhile
        pass
    finally:
        connection.detach()


def end_accepted(descriptor: int, endpoints: set[str]) -> None:
    """End the connection with this descriptor if it was accepted on one of these endpoints."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed meanwhile
        return
    try:
        if _endpoints(connection) & endpoints:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the peer closed it meanwhile
        pass
    finally:
        connection.detach()


def accepted(endpoints: set[str]) -> Iterator[tuple[int, socket.socket]]:
    """Descriptor and socket of each connection that was accepted on these endpoints."""
    for name in os.listdir("/dev/fd"):
        try:
            connection = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if _endpoints(connection) & endpoints:
                yield int(name), connection
        finally:
            connection.detach()


def _endpoints(connection: socket.socket) -> set[str]:
    """The endpoints that may have accepted it, wildcard addresses included; empty: none."""
    try:
        if connection.type != socket.SOCK_STREAM or _is_listening(connection):
            return set()
        own = connection.getsockname()
    except OSError:
        return set()
    if isinstance(own, tuple):
        host = f"[{own[0]}]" if ":" in own[0] else own[0]
        return {f"tcp://{each}:{own[1]}" for each in (host, "0.0.0.0", "[::]")}
    return {f"ipc://{own}"}


def _is_listening(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
