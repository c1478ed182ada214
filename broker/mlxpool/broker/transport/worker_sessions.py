"""Which connection of the back socket belongs to which slot, and to which epoch.

A frame of a worker counts only on the connection that got its epoch's `welcome`, and only with that
epoch: this is the fencing of workers that were replaced.
"""

from __future__ import annotations

from mlxpool.broker.transport.peers import Peer, Peers


class WorkerSessions:
    """Owned by the broker's thread, like the socket behind `peers`."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._numbers: dict[str, int] = {}  # slot -> number of its connection
        self._epochs: dict[int, int] = {}  # number of a welcomed connection -> its epoch

    def open(self, slot: str, number: int) -> None:
        """The worker of this slot is on this connection; the slot's earlier one is forgotten."""
        before = self._numbers.get(slot)
        if before is not None and before != number:
            self.close(slot)
        self._numbers[slot] = number

    def welcome(self, number: int, epoch: int) -> None:
        """Frames with this epoch count on this connection."""
        self._epochs[number] = epoch

    def connection(self, slot: str) -> int | None:
        """The number of the slot's connection."""
        return self._numbers.get(slot)

    def epoch(self, number: int) -> int | None:
        """The epoch that a connection was welcomed with."""
        return self._epochs.get(number)

    def epoch_of_slot(self, slot: str) -> int | None:
        return self._epochs.get(self._numbers.get(slot, -1))

    def release(self, slot: str) -> int | None:
        """The slot has no connection from now on; returns the number of the one it had."""
        number = self._numbers.pop(slot, None)
        if number is not None:
            self._epochs.pop(number, None)
        return number

    def close(self, slot: str) -> Peer | None:
        """Forget the slot's connection; returns its peer, where it is still known."""
        number = self.release(slot)
        if number is None:
            return None
        peer = self.peers.by_number.get(number)
        self.peers.forget(number)
        return peer

    def send(self, slot: str, parts: list[bytes]) -> bool:
        """Send to the slot's worker; False when it takes nothing any more (its backlog is full).

        True also when the connection is gone: the worker says `hello` again, or is judged hung.
        """
        number = self._numbers.get(slot)
        if number is None:
            return True
        return self.peers.send(number, parts) or not self.peers.overflowed(number)

    def sweep(self) -> None:
        """Forget connections that have ended and belong to no slot."""
        used = set(self._numbers.values())
        for peer in list(self.peers.by_number.values()):
            if peer.gone and peer.number not in used:
                self.peers.forget(peer.number)
