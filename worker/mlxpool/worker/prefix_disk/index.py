"""Which records the segments have: by key, and by the key of the inputs before them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mlxpool.worker.prefix_disk.records import Kind, RecordHeader
from mlxpool.worker.prefix_disk.segments import Place, Segment


class Index:
    """The places of all records. One thread changes it; others may ask whether a key is there.

    Of several records with one kind and key the first counts, while its segment is there.
    """

    def __init__(self) -> None:
        self._places: dict[Kind, dict[bytes, Place]] = {kind: {} for kind in Kind}
        self._behind: dict[bytes, list[bytes]] = {}  # keys of blocks, by the key before them
        self._held: dict[Segment, dict[tuple[Kind, bytes], bytes]] = {}  # and the key before each

    def __len__(self) -> int:
        """The number of records."""
        return sum(map(len, self._places.values()))

    def add(self, header: RecordHeader, place: Place) -> bool:
        """Adds a record, unless there is one of its kind and key; returns whether it did."""
        places = self._places[header.kind]
        if header.key in places:
            return False
        places[header.key] = place
        self._held.setdefault(place.segment, {})[header.kind, header.key] = header.parent
        if header.kind is Kind.TOKENS:
            self._behind.setdefault(header.parent, []).append(header.key)
        return True

    def remove(self, segment: Segment) -> None:
        """Removes the records of a segment that was deleted."""
        for (kind, key), parent in self._held.pop(segment, {}).items():
            self._drop(kind, key, parent)

    def discard(self, kind: Kind, key: bytes) -> None:
        """Removes one record, which did not check."""
        place = self._places[kind].get(key)
        if place is not None:
            self._drop(kind, key, self._held[place.segment].pop((kind, key)))

    def tokens(self, key: bytes) -> Place | None:
        """Returns the place of the record of inputs with this key."""
        return self._places[Kind.TOKENS].get(key)

    def state(self, key: bytes) -> Place | None:
        """Returns the place of the snapshot behind the inputs with this key."""
        return self._places[Kind.STATE].get(key)

    def has(self, kind: Kind, key: bytes) -> bool:
        """Whether there is a record of a kind and key; any thread may ask."""
        return key in self._places[kind]

    def behind(self, parent: bytes) -> Sequence[bytes]:
        """Returns the keys of the blocks behind those of a key, the oldest first."""
        return self._behind.get(parent, ())

    def _drop(self, kind: Kind, key: bytes, parent: bytes) -> None:
        del self._places[kind][key]
        if kind is Kind.TOKENS:
            keys = self._behind[parent]
            keys.remove(key)
            if not keys:
                del self._behind[parent]
