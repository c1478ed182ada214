"""Turns out peers that fill the broker's memory with messages which they never finish.

libzmq bounds neither the parts nor the bytes of an unfinished message (MAXMSGSIZE is for one part)
and tells nobody of them. But who has live streams pings every second, and nothing else can come
from a peer in the middle of a message. So when more memory is used than the books explain, those go
from whom no whole message came lately; if that does not help, everybody goes, and the front stays
shut until it is known how much is left. Who meant no harm redials and sends its streams again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
from collections.abc import Iterator

from mlxpool.broker.core.state import State
from mlxpool.broker.edge.listener import Door
from mlxpool.broker.edge.peers import Peers, inode_of
from mlxpool.broker.processes import system

log = logging.getLogger("mlxpool.broker")

LIMIT = 512 * 1024 * 1024  # bytes beyond what the books explain
PERIOD = 0.25  # seconds between two looks
SETTLE = 0.5  # seconds until what was cut is freed; the front stays shut for longer
QUIET = 2.0  # seconds without a whole message, of a peer that has live streams
UNREAD_ID = 64  # bytes of an id that was sent and is not acknowledged, somewhere in a socket
OVERHEAD = 2  # times its bytes, for what Python keeps


class Guard:
    """Owned by the broker's one thread. Looks at memory only; CPU is shared out by the loop."""

    def __init__(self, door: Door, front: Peers) -> None:
        self.door = door
        self.front = front
        self.look_at = 0.0
        self.turned_out = 0  # connections so far
        self._floor = 0  # bytes that stayed when nobody was connected: nobody's fault
        self._strikes = 0

    def watch(self, books: State, now: float) -> None:
        """Turn peers out if it is time to look and memory is short."""
        if now < self.look_at:
            return
        self.look_at = now + PERIOD
        if self._strikes:
            _give_back()  # what was cut is free by now, or somebody else is to blame
        used = system.resident(os.getpid()) - self._floor
        if self._strikes < 2 and (used < LIMIT or used - explained(books, self.front) < LIMIT):
            self._strikes = 0
            return
        self.look_at = now + SETTLE
        self._strikes += 1
        if self._strikes == 1:
            self._turn_out(self._talking(books, now), used)
        elif self._strikes == 2:
            self.door.shut_now(now)
            self._turn_out(set(), used)
        else:
            self._set_floor(used - explained(books, self.front))

    def _set_floor(self, left: int) -> None:
        """Nobody is connected: what is `left` is what the C library keeps; room goes on top.

        At most LIMIT, for some of it may be messages of those who went that are not read yet.
        """
        self._floor = min(LIMIT, max(0, self._floor + left - LIMIT // 2))
        self._strikes = 0

    def _talking(self, books: State, now: float) -> set[int]:
        """Descriptors of peers with live streams that are not in the middle of a message."""
        return {
            peer.descriptor
            for number, link in books.links.items()
            if link.ids and now - link.heard_at < QUIET
            if (peer := self.front.by_number.get(number)) is not None
        }

    def _turn_out(self, spared: set[int], used: int) -> None:
        count = 0
        for descriptor, connection in _accepted(set(self.door.endpoints)):
            if descriptor not in spared:
                with contextlib.suppress(OSError):  # it has just gone by itself
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        self.turned_out += count
        log.warning("turned peers out: memory is short", extra={"peers": count, "bytes": used})


def explained(books: State, front: Peers) -> int:
    """Bytes that requests and full peers may hold at most."""
    requests = sum(
        request.message.size
        + len(request.run.ids)
        + request.reader.unread_bytes
        + UNREAD_ID * (request.reader.sent - request.reader.acked)
        for request in books.requests.values()
    )
    return OVERHEAD * (requests + sum(front.by_number[n].backlog_bytes for n in front.full))


def _accepted(endpoints: set[str]) -> Iterator[tuple[int, socket.socket]]:
    """Our ends of the connections that came in on these endpoints."""
    for name in os.listdir("/dev/fd"):
        try:
            found = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed by now
            continue
        try:
            if _endpoints(found) & endpoints:
                yield int(name), found
        finally:
            found.detach()


def _endpoints(found: socket.socket) -> set[str]:
    """On which endpoints a connection may have come in: one for all addresses is one of them."""
    try:
        if found.type != socket.SOCK_STREAM or _listens(found):
            return set()
        own = found.getsockname()
    except OSError:
        return set()
    if isinstance(own, tuple):
        host = f"[{own[0]}]" if ":" in own[0] else own[0]
        return {f"tcp://{each}:{own[1]}" for each in (host, "0.0.0.0", "[::]")}
    return {f"ipc://{own}"}


def cut(descriptor: int, inode: int) -> None:
    """End a connection by its descriptor; left alone, if that is another's or none any more."""
    if descriptor < 0 or inode_of(descriptor) != inode:
        return
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        if _endpoints(found):
            found.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has just gone by itself
        pass
    finally:
        found.detach()


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _give_back() -> None:
    """Have the C library return what is free to the system, where it can."""
    if system.LINUX:
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
