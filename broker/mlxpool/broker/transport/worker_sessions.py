"""The slots and epochs of workers' connections on the back socket.

A worker's frame is valid only on the connection that got the `welcome` of its epoch, and only with
that epoch. This fences replaced workers.
"""

from __future__ import annotations

from mlxpool.broker.transport.peers import Peer, Peers


class WorkerSessions:
    """The connections of slots. Owned by the broker's thread, like the socket of `peers`."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._numbers: dict[str, int] = {}  # slot -> number of its connection
        self._epochs: dict[int, int] = {}  # number of a welcomed connection -> its epoch

    def open(self, slot: str, number: int) -> None:
        """Sets the connection of a slot's worker. The slot's earlier connection is forgotten."""
        before = self._numbers.get(slot)
        if before is not None and before != number:
            self.close(slot)
        self._numbers[slot] = number

    def welcome(self, number: int, epoch: int) -> None:
        """Makes frames with this epoch valid on this connection."""
        self._epochs[number] = epoch

    def connection(self, slot: str) -> int | None:
        """Returns the number of the slot's connection, or None."""
        return self._numbers.get(slot)

    def epoch(self, number: int) -> int | None:
        """Returns the epoch in a connection's `welcome`, or None."""
        return self._epochs.get(number)

    def epoch_of_slot(self, slot: str) -> int | None:
        return self._epochs.get(self._numbers.get(slot, -1))

    def release(self, slot: str) -> int | None:
        """Removes the connection of a slot. Returns its number; None without a connection."""
        number = self._numbers.pop(slot, None)
        if number is not None:
            self._epochs.pop(number, None)
        return number

    def close(self, slot: str) -> Peer | None:
        """Forgets the connection of a slot.

        Returns the connection's peer, or None if it is unknown.
        """
        number = self.release(slot)
        if number is None:
            return None
        peer = self.peers.by_number.get(number)
        self.peers.forget(number)
        return peer

    def send(self, slot: str, parts: list[bytes]) -> bool:
        """Sends a message to the slot's worker. Returns False if the worker's backlog is full.

        Returns True even if the connection is closed: the worker then sends `hello` again, or is
        judged hung.
        """
        number = self._numbers.get(slot)
        if number is None:
            return True
        return self.peers.send(number, parts) or not self.peers.overflowed(number)

    def sweep(self) -> None:
        """Forgets connections that have ended and belong to no slot."""
        used = set(self._numbers.values())
        for peer in list(self.peers.by_number.values()):
            if peer.gone and peer.number not in used:
                self.peers.forget(peer.number)
