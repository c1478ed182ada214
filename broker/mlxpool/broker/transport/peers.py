"""The peers (connections) of a ROUTER: each has a number, and a bounded backlog while it is full.

libzmq's POLLOUT only means that *some* peer accepts messages, so sends to a full peer are retried,
see Backlogs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq
from msgspec import Struct, field

from mlxpool.broker.core.state import Timers
from mlxpool.broker.transport.listener import has_ended, inode_of, shut_down
from mlxpool.common.protocol.frames import MAX_PARTS

FIRST_RETRY = 0.01  # seconds until the next try, once a peer became full or accepted a message
MAX_RETRY = 0.64  # most seconds until the next try; each failed try doubles the wait
MAX_SENDS = 128  # most sends in an iteration of the loop, including failed sends
MAX_BACKLOGS = 256 * 1024 * 1024  # most bytes waiting for all clients
PART_BYTES = 64  # bytes of memory of a part, in addition to its contents


def size_of(parts: Sequence[bytes]) -> int:
    """Returns the estimated memory of a queued message, in bytes."""
    return sum(map(len, parts)) + PART_BYTES * len(parts)


class Backlogs:
    """The peers that have a backlog, by peer number, in the order of their last progress.

    Sends to a full peer are retried less and less often, so that many full peers cost little. A
    frame from a peer makes its next retry due now, because the peer may read again. This class
    counts the bytes of all backlogs; each Peer has the messages.
    """

    def __init__(self, max_bytes: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._waits: dict[int, float] = {}  # number of a peer -> seconds to wait after a failed try
        self._new: list[int] = []  # peers whose first try is not scheduled yet
        self._retries: Timers[int] = Timers()

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, number: int) -> bool:
        return number in self._waits

    def __iter__(self) -> Iterator[int]:
        return iter(self._waits)

    @property
    def exceeded(self) -> bool:
        return self.bytes > self.max_bytes

    def stuck_longest(self, bytes_of: Callable[[int], int]) -> int:
        """Returns the peer that has made no progress for longest, among peers with a large backlog.

        A large backlog has at least half as many bytes as the mean backlog. `bytes_of` returns the
        backlog of a peer in bytes. Peers with a small backlog are spared, because their end would
        free little memory. All small backlogs together have less than half of the bytes, so a large
        backlog always exists.
        """
        enough = self.bytes / len(self._waits) / 2
        return next(number for number in self._waits if bytes_of(number) >= enough)

    def add(self, number: int, size: int) -> None:
        """Counts a message of `size` bytes that waits for a peer."""
        self.bytes += size
        if number not in self._waits:
            self._waits[number] = FIRST_RETRY
            self._new.append(number)

    def sent(self, size: int) -> None:
        """Removes a message of `size` bytes from the count, because it was sent."""
        self.bytes -= size

    def drop(self, number: int, size: int) -> None:
        """Stops the retries of a peer. `size` bytes of its backlog are dropped unsent."""
        self.bytes -= size
        if self._waits.pop(number, None) is not None:
            self._retries.clear(number)

    def heard(self, number: int, now: float) -> None:
        """Makes the next retry of a peer due now, because the peer sent a frame.

        An overdue retry keeps its position in the queue. Otherwise a peer that sends often would
        always be the last.
        """
        self._waits[number] = FIRST_RETRY
        if self._retries.at(number) > now:
            self._retries.set(number, now)

    # ---- tries -------------------------------------------------------------------------------

    def next_wake(self) -> float:
        """Returns the time of the next retry; infinity without backlogs.

        It is 0 if a peer has got a backlog since the last call of `due`.
        """
        return 0.0 if self._new else self._retries.next()

    def due(self, now: float) -> int | None:
        """Returns the number of the next peer to retry. `put_back` or `drop` must follow."""
        for number in self._new:
            if number in self._waits and number not in self._retries:
                self._retries.set(number, now + FIRST_RETRY)
        self._new.clear()
        numbers = self._retries.due(now, 1)
        return numbers[0] if numbers else None

    def put_back(self, number: int, now: float, *, progress: bool, more: bool) -> None:
        """Schedules the next retry of a peer that still has a backlog.

        `progress`: the peer accepted some messages. `more`: the peer may accept more messages
        immediately. It is then retried at once, but after the other peers whose retry is due.
        """
        if progress:
            del self._waits[number]
            self._waits[number] = FIRST_RETRY
            wait = 0.0 if more else FIRST_RETRY
        else:
            wait = self._waits[number]
            self._waits[number] = min(MAX_RETRY, 2 * wait)
        self._retries.set(number, now + wait)


MAX_SKIPPED_PARTS = 1024  # most parts of a message with too many parts that one call reads
MAX_BACKLOG = 16 * 1024 * 1024  # most bytes queued here for a peer, beyond libzmq's own queue

Authorize = Callable[[str], str]  # returns the owner of a handshake's user id; "": not allowed here


class Peer(Struct, eq=False):
    """A connection. Its `number` is never reused."""

    name: bytes  # the routing id from the ROUTER
    number: int
    heard_at: float
    owner: str
    descriptor: int = -1  # descriptor of the broker's end of a live connection; -1: unknown
    inode: int = -1  # the descriptor's inode, to detect a reuse before the end is known
    user: str = ""  # the handshake's user id, on sockets with authorization
    admitted: bool = True  # True if the peer's newest message was authorized
    gone: bool = False  # True if the connection is closed; messages may still be unread
    backlog: deque[list[bytes]] = field(default_factory=deque)
    backlog_bytes: int = 0


class Peers:
    """The peers of a ROUTER socket. Owned by the broker's thread, like its socket."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        authorize: Authorize | None = None,
        *,
        keep_gone: bool = False,
        max_backlogs: float = math.inf,
    ) -> None:
        """With `authorize`, the sender of each message is checked by the user id of its handshake.

        `keep_gone`: a closed peer keeps its number until `forget`, so that messages that it sent
        before are still recognised as messages of this peer. Without `keep_gone`, it is forgotten
        immediately. `max_backlogs`: the bound on the bytes that wait for all peers together.
        """
        self.socket = socket
        self.authorize = authorize
        self.keep_gone = keep_gone
        self.by_name: dict[bytes, Peer] = {}
        self.by_number: dict[int, Peer] = {}
        self._by_descriptor: dict[int, Peer] = {}
        self.full = Backlogs(max_backlogs)  # the peers with a backlog
        self.given_up = 0  # number of peers closed because they read too little
        self._given_up: list[int] = []  # peers given up for the shared bound since the last `retry`
        self._overflowed = 0  # number of the peer last given up for its own long backlog
        self._skipping: tuple[Peer, list[bytes]] | None = None  # a message with too many parts
        self._count = 0

    def receive(self, now: float) -> tuple[Peer, list[bytes]] | None:
        """Returns the sender and the parts of the next message; None without a message.

        Also returns None while a message with too many parts is skipped, which takes several calls.
        """
        if self._skipping is not None:
            return self._skip()
        socket = self.socket
        try:
            name = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        peer = self.by_name.get(name)
        if peer is None or self.authorize is not None:  # only a Frame has the peer's metadata
            frame = socket.recv(copy=False)
            peer = self._sender(name, peer, frame, now)
            parts = [frame.bytes]
        else:
            parts = [socket.recv()]
        peer.heard_at = now
        if peer.backlog:
            self.full.heard(peer.number, now)
        while socket.getsockopt(zmq.RCVMORE):
            if len(parts) > MAX_PARTS:
                self._skipping = peer, parts
                return self._skip()
            parts.append(socket.recv())
        return peer, parts

    def _skip(self) -> tuple[Peer, list[bytes]] | None:
        """Skips some parts of a message with too many parts.

        Returns the sender and the first parts after the last part was skipped, and None before. A
        message may have millions of parts, and other peers wait.
        """
        for _ in range(MAX_SKIPPED_PARTS):
            if not self.socket.getsockopt(zmq.RCVMORE):
                message, self._skipping = self._skipping, None
                return message
            self.socket.recv()
        return None

    def _sender(self, name: bytes, known: Peer | None, frame: zmq.Frame, now: float) -> Peer:
        """Returns the sender. A peer that takes over a routing id counts as a new connection."""
        if self.authorize is None:
            return known or self._register(name, frame, now)
        user = _user(frame)
        if known is not None and known.user != user:
            self.forget(known.number)
            known = None
        peer = known or self._register(name, frame, now)
        owner = self.authorize(user)
        peer.user, peer.admitted, peer.owner = user, bool(owner), owner or peer.owner
        return peer

    def _register(self, name: bytes, frame: zmq.Frame, now: float) -> Peer:
        self._count += 1
        descriptor = _descriptor(frame)
        peer = Peer(name, self._count, now, _owner(frame), descriptor, inode_of(descriptor))
        self.by_name[name] = self.by_number[peer.number] = peer
        before = self._by_descriptor.get(peer.descriptor)
        if before is not None:  # the descriptor was reused: the connection of `before` has ended
            before.descriptor = -1
        if peer.descriptor >= 0:
            self._by_descriptor[peer.descriptor] = peer
        return peer

    def send(self, number: int, parts: list[bytes]) -> bool:
        """Sends or queues a message. Returns False if the peer is closed or given up."""
        peer = self.by_number.get(number)
        if peer is None:
            return False
        if not peer.backlog:
            sent = self._try(peer, parts)
            if sent is not None:
                return sent
        return self._queue(peer, parts)

    def _try(self, peer: Peer, parts: list[bytes]) -> bool | None:
        """Tries to send a message.

        Returns True if it was sent, False if the peer is closed, and None if the peer is full.
        """
        try:
            self.socket.send_multipart([peer.name, *parts], zmq.NOBLOCK)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._mark_gone(peer)
            return False
        peer.gone = False
        return True

    def _mark_gone(self, peer: Peer) -> None:
        if not self.keep_gone:
            self.forget(peer.number)
            return
        peer.gone = True
        self._drop_backlog(peer)

    def _drop_backlog(self, peer: Peer) -> None:
        self.full.drop(peer.number, peer.backlog_bytes)
        peer.backlog.clear()
        peer.backlog_bytes = 0

    def _queue(self, peer: Peer, parts: list[bytes]) -> bool:
        """Queues a message. Returns False if the peer was given up.

        If the backlogs of all peers together exceed their bound, peers without progress are given
        up.
        """
        size = size_of(parts)
        peer.backlog.append(parts)
        peer.backlog_bytes += size
        self.full.add(peer.number, size)
        if peer.backlog_bytes > MAX_BACKLOG:
            self._overflowed = peer.number
            self._give_up(peer)
            return False
        while self.full.exceeded:
            stuck = self.by_number[self.full.stuck_longest(self._backlog_of)]
            self._give_up(stuck)
            if stuck is peer:
                return False
            self._given_up.append(stuck.number)
        return True

    def _backlog_of(self, number: int) -> int:
        return self.by_number[number].backlog_bytes

    def _give_up(self, peer: Peer) -> None:
        """Closes the connection of a peer that reads too little, so that libzmq frees its queue.

        If `keep_gone` is set, the peer is a worker. It is then only forgotten, and its connection
        stays open. The caller ends the worker, which it finds by the peer's number.
        """
        self.given_up += 1
        if self.keep_gone:
            self.forget(peer.number)
        else:
            self.disconnect(peer)

    def overflowed(self, number: int) -> bool:
        """Returns whether the peer is the last peer that was given up for its own long backlog."""
        return number == self._overflowed

    def next_retry(self) -> float:
        """Returns the time of the next `retry`; infinity without backlogs."""
        return 0.0 if self._given_up else self.full.next_wake()

    def retry(self, now: float) -> list[int]:
        """Retries full peers whose retry is due, with at most MAX_SENDS attempts to send.

        Returns the numbers of the peers that were closed or given up since the last call.
        """
        gone, self._given_up = self._given_up, []
        room = MAX_SENDS
        while room > 0 and (number := self.full.due(now)) is not None:
            peer = self.by_number[number]
            tries, sent = self._send_backlog(peer, room)
            room -= tries
            if sent is False:
                gone.append(number)
            elif peer.backlog:
                self.full.put_back(number, now, progress=bool(sent) or tries > 1, more=bool(sent))
        return gone

    def _send_backlog(self, peer: Peer, room: int) -> tuple[int, bool | None]:
        """Sends at most `room` messages of a peer's backlog.

        Returns the number of attempts to send, and the result of the last attempt.
        """
        tries, sent = 0, None
        while peer.backlog and tries < room:
            tries += 1
            sent = self._try(peer, peer.backlog[0])
            if not sent:
                break
            size = size_of(peer.backlog.popleft())
            peer.backlog_bytes -= size
            self.full.sent(size)
        if not peer.backlog:
            self.full.drop(peer.number, 0)
        return tries, sent

    def forget(self, number: int) -> None:
        """Forgets a peer. If the peer's connection sends again, it gets a new number."""
        peer = self.by_number.pop(number, None)
        if peer is not None:
            del self.by_name[peer.name]
            if self._by_descriptor.get(peer.descriptor) is peer:
                del self._by_descriptor[peer.descriptor]
            self._drop_backlog(peer)

    def ended(self, descriptor: int) -> Peer | None:
        """Forgets the peer whose connection with this descriptor has ended. Returns the peer.

        Returns None if the descriptor is unknown, or now belongs to a newer connection.
        """
        peer = self._by_descriptor.get(descriptor)
        if peer is None or not has_ended(peer.descriptor, peer.inode):
            return None
        self.forget(peer.number)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Closes the connection of a peer, and drops its unread messages."""
        self.forget(peer.number)
        shut_down(peer.descriptor, peer.inode)

    def disconnect_user(self, user: str) -> None:
        """Closes all connections whose handshake had this user id."""
        for peer in list(self.by_number.values()):
            if peer.user == user:
                self.disconnect(peer)


def _owner(frame: zmq.Frame) -> str:
    """Returns `uid:N` on ipc, from the kernel's credentials, else `host:` and the address."""
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
