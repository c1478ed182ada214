"""The log of a process's changes to a folder, and disk images as after a loss of power.

disk_shim.cpp writes the log. An image has all data that was synced before the loss, and a random
part of the later data. Of each later write it has some sectors, one of which may be torn. Of the
later changes of names it has a random number, the earliest first.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512  # bytes that a disk writes as a unit, or tears
_HEAD = struct.Struct("<cQQI")


@dataclass(frozen=True, slots=True)
class Record:
    """A record of the log: the letter `what` is its type, and the other fields depend on the type.

    O: a file was opened for creation. `first`: inode; `second`: 1 if truncated; `data`: path.
    W: bytes were written. `first`: inode; `second`: offset; `data`: the bytes.
    T: a file was truncated. `first`: inode; `second`: the new size.
    S: a file was synced. `first`: inode.
    D: a folder was synced. `data`: path.
    U: a name was unlinked. `data`: path.
    K: a folder was made. `data`: path.
    R: a name was changed. `first`: length of the old path; `data`: old path, NUL, new path.
    M: the process wrote a mark. `data`: text.
    """

    what: str
    first: int
    second: int
    data: bytes


def read_log(path: Path) -> list[Record]:
    """Returns the complete records; a kill may cut the last record."""
    raw = path.read_bytes()
    records, at = [], 0
    while at + _HEAD.size <= len(raw):
        what, first, second, length = _HEAD.unpack_from(raw, at)
        at += _HEAD.size
        if at + length > len(raw):
            break
        records.append(Record(what.decode(), first, second, raw[at : at + length]))
        at += length
    return records


Change = tuple[int, bytes | None]  # (offset, data) of a write, (size, None) of a truncation


@dataclass(slots=True)
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)


@dataclass(slots=True)
class Disk:
    """The files of the folder `root`, and their unsynced changes, after `play` of some records."""

    root: str
    _files: dict[int, _File] = field(default_factory=dict)  # by a number that this class assigns
    _of_inode: dict[int, int] = field(default_factory=dict)
    _live: dict[str, int] = field(default_factory=dict)  # names as the process sees them
    _names: dict[str, int] = field(default_factory=dict)  # names that are on the disk
    _folders: set[str] = field(default_factory=set)
    _changes: list[tuple[str, str, int]] = field(default_factory=list)  # unsynced name changes

    def play(self, record: Record) -> None:
        """Applies one record."""
        text = record.data.decode(errors="replace")
        match record.what:
            case "O":
                self._opened(record.first, text, truncate=bool(record.second))
            case "W":
                self._file(record.first).pending.append((record.second, record.data))
            case "T":
                self._file(record.first).pending.append((record.second, None))
            case "S":
                file = self._file(record.first)
                for change in file.pending:
                    _apply(file.durable, change)
                file.pending.clear()
            case "K":
                self._changes.append(("K", text, 0))
            case "U":
                self._changes.append(("-", text, 0))
                self._live.pop(text, None)
            case "R":
                old, new = text.split("\0")
                number = self._live.pop(old)
                self._live[new] = number
                self._changes += [("R", f"{old}\0{new}", number)]
            case "D":
                self._sync_names(text)

    def _opened(self, inode: int, path: str, truncate: bool) -> None:
        if path not in self._live:
            number = len(self._files) + 1
            self._files[number] = _File()
            self._of_inode[inode] = number
            self._live[path] = number
            self._changes.append(("+", path, number))
        elif truncate:
            self._file(inode).pending.append((0, None))

    def _file(self, inode: int) -> _File:
        return self._files[self._of_inode[inode]]

    def _sync_names(self, folder: str) -> None:
        """Puts every name change in this folder on the disk."""
        kept = []
        for change in self._changes:
            if all(str(Path(path).parent) == folder for path in change[1].split("\0")):
                _rename(self._names, self._folders, change)
            else:
                kept.append(change)
        self._changes = kept

    def image(self, target: Path, draw: random.Random) -> None:
        """Writes into `target` a state that `root` may have after a loss of power at this point."""
        names, folders = dict(self._names), set(self._folders)
        for change in self._changes[: draw.randint(0, len(self._changes))]:
            _rename(names, folders, change)
        # The probability that an unsynced sector is on the disk.
        likely = draw.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        target.mkdir()
        for folder in sorted(folders):
            (target / Path(folder).relative_to(self.root)).mkdir()
        for path, number in names.items():
            place = target / Path(path).relative_to(self.root)
            if place.parent.is_dir():
                place.write_bytes(_after_loss(self._files[number], likely, draw))


def _rename(names: dict[str, int], folders: set[str], change: tuple[str, str, int]) -> None:
    what, path, number = change
    if what == "K":
        folders.add(path)
    elif what == "+":
        names[path] = number
    elif what == "-":
        names.pop(path, None)
    else:
        old, new = path.split("\0")
        names.pop(old, None)
        names[new] = number


def _apply(content: bytearray, change: Change) -> None:
    at, data = change
    if data is None:
        del content[at:]
        return
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


def _after_loss(file: _File, likely: float, draw: random.Random) -> bytes:
    content = bytearray(file.durable)
    for at, data in file.pending:
        if data is None:
            if draw.random() < likely:
                _apply(content, (at, None))
            continue
        for sector, part in _sectors(at, data):
            if draw.random() < likely:
                torn = draw.random() < 0.02
                _apply(content, (sector, part[: draw.randint(1, len(part))] if torn else part))
    return bytes(content)


def _sectors(at: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the parts of a write, each within one sector."""
    done = 0
    while done < len(data):
        length = min(SECTOR - (at + done) % SECTOR, len(data) - done)
        yield at + done, data[done : done + length]
        done += length
