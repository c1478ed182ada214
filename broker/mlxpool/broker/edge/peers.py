"""The peers of one ROUTER: a number for each connection, a bounded queue for each that is full.

libzmq's POLLOUT says only that *some* peer can be written to, so a full peer is tried again at its
next frame or when the loop asks for it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from mlxpool.common.protocol.frames import MAX_PARTS

SKIP = 1024  # parts read in one go of a message with more than the protocol has
MAX_BACKLOG = 16 * 1024 * 1024  # bytes queued here for one peer, beyond what libzmq holds

Gate = Callable[[str], str]  # the id that a handshake gave -> the owner; "": nobody for this socket


@dataclass(eq=False, slots=True)
class Peer:
    """One connection; `number` is never used again."""

    name: bytes  # the routing id that the ROUTER gave it
    number: int
    heard_at: float
    owner: str
    descriptor: int = -1  # of our end, as long as the connection lives; -1: unknown
    inode: int = -1  # of that descriptor, whose number may be another's before we hear of its end
    user: str = ""  # the id that the handshake gave it, where one is asked for
    admitted: bool = True  # whether its newest message counts
    gone: bool = False  # nothing can be sent to it; what it sent before may still be unread
    backlog: deque[list[bytes]] = field(default_factory=deque)
    backlog_bytes: int = 0


class Peers:
    """Owned by the broker's one I/O thread, like its socket."""

    def __init__(
        self, socket: zmq.Socket[bytes], gate: Gate | None = None, *, to_the_last: bool = False
    ) -> None:
        """With a `gate` every message says whose it is, by the handshake of its connection.

        `to_the_last`: who is found gone keeps its number until `forget`, so that its last messages
        are still its own; else it is forgotten at once.
        """
        self.socket = socket
        self.gate = gate
        self.to_the_last = to_the_last
        self.by_name: dict[bytes, Peer] = {}
        self.by_number: dict[int, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self.full: set[int] = set()  # numbers with a backlog
        self._overflow = 0  # the newest number given up for its backlog
        self._long: tuple[Peer, list[bytes]] | None = None  # too many parts, not all read yet
        self._count = 0

    def receive(self, now: float) -> tuple[Peer, list[bytes]] | None:
        """The next message that is there, and whose it is; None when there is none.

        None, too, while a message has so many parts that it takes several calls to read past them.
        """
        if self._long is not None:
            return self._skip()
        socket = self.socket
        try:
            name = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        peer = self.by_name.get(name)
        if peer is None or self.gate is not None:  # only a frame knows whence it came
            frame = socket.recv(copy=False)
            peer = self._sender(name, peer, frame, now)
            parts = [frame.bytes]
        else:
            parts = [socket.recv()]
        peer.heard_at = now
        while socket.getsockopt(zmq.RCVMORE):
            if len(parts) > MAX_PARTS:
                self._long = peer, parts
                return self._skip()
            parts.append(socket.recv())
        return peer, parts

    def _skip(self) -> tuple[Peer, list[bytes]] | None:
        """Read past parts that are too many: a message may have millions, and others wait."""
        for _ in range(SKIP):
            if not self.socket.getsockopt(zmq.RCVMORE):
                whole, self._long = self._long, None
                return whole
            self.socket.recv()
        return None

    def _sender(self, name: bytes, known: Peer | None, frame: zmq.Frame, now: float) -> Peer:
        """Names of connections are what peers say they are: who has taken one over is new here."""
        if self.gate is None:
            return known or self._meet(name, frame, now)
        user = _user(frame)
        if known is not None and known.user != user:
            self.forget(known.number)
            known = None
        peer = known or self._meet(name, frame, now)
        owner = self.gate(user)
        peer.user, peer.admitted, peer.owner = user, bool(owner), owner or peer.owner
        return peer

    def _meet(self, name: bytes, frame: zmq.Frame, now: float) -> Peer:
        self._count += 1
        descriptor = _descriptor(frame)
        peer = Peer(name, self._count, now, _owner(frame), descriptor, inode_of(descriptor))
        self.by_name[name] = self.by_number[peer.number] = peer
        before = self._by_descriptor.get(peer.descriptor)
        if before is not None:  # its connection has ended, or the number would not be free
            before.descriptor = -1
        if peer.descriptor >= 0:
            self._by_descriptor[peer.descriptor] = peer
        return peer

    def send(self, number: int, parts: list[bytes]) -> bool:
        """Send or queue; False when the peer is gone or has more than MAX_BACKLOG waiting."""
        peer = self.by_number.get(number)
        if peer is None:
            return False
        if not peer.backlog:
            sent = self._try(peer, parts)
            if sent is not None:
                return sent
        return self._queue(peer, parts)

    def _try(self, peer: Peer, parts: list[bytes]) -> bool | None:
        """True sent, False gone, None full."""
        try:
            self.socket.send_multipart([peer.name, *parts], zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lost(peer)
            return False
        peer.gone = False
        return True

    def _lost(self, peer: Peer) -> None:
        if not self.to_the_last:
            self.forget(peer.number)
            return
        peer.gone = True
        peer.backlog.clear()
        peer.backlog_bytes = 0
        self.full.discard(peer.number)

    def _queue(self, peer: Peer, parts: list[bytes]) -> bool:
        peer.backlog.append(parts)
        peer.backlog_bytes += sum(map(len, parts))
        self.full.add(peer.number)
        if peer.backlog_bytes > MAX_BACKLOG:
            self._overflow = peer.number
            self.forget(peer.number)
            return False
        return True

    def overflowed(self, number: int) -> bool:
        """Whether it was just now given up for taking nothing any more, not for being gone."""
        return number == self._overflow

    def retry(self) -> list[int]:
        """Try every full peer again; returns the numbers of those that turned out to be gone."""
        gone = []
        for number in sorted(self.full):
            peer = self.by_number[number]
            while peer.backlog:
                sent = self._try(peer, peer.backlog[0])
                if sent is None:
                    break
                if sent is False:
                    gone.append(number)
                    break
                peer.backlog_bytes -= sum(map(len, peer.backlog.popleft()))
            if not peer.backlog:
                self.full.discard(number)
        return gone

    def forget(self, number: int) -> None:
        """Drop what is known of a connection; a later message on it makes a new number."""
        peer = self.by_number.pop(number, None)
        if peer is not None:
            del self.by_name[peer.name]
            if self._by_descriptor.get(peer.descriptor) is peer:
                del self._by_descriptor[peer.descriptor]
            self.full.discard(number)


def inode_of(descriptor: int) -> int:
    """What tells a descriptor from another one of its number; -1: there is none."""
    try:
        return os.fstat(descriptor).st_ino if descriptor >= 0 else -1
    except OSError:
        return -1


def _owner(frame: zmq.Frame) -> str:
    """Who the peer is by the kernel's word on ipc (uid), else by its address's host."""
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown"
    if address.startswith("localhost:"):
        return f"uid:{address.split(':')[1]}"
    return f"host:{address}"


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
