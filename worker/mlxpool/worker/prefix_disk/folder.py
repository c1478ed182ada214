"""The folder of the segments of one model: its owner and modes, its bound in bytes, its deletions.

DIR/MODEL/DIGEST/NAME.seg, where MODEL is the quoted name. The bound is that of all segments of a
model, also those of other weights, rules or layouts, which are the first to be deleted: nobody uses
them any more. Workers take the lock DIR/MODEL/lock to append and to delete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from msgspec import Struct

from mlxpool.worker.prefix_disk.segments import FILE_MODE, SUFFIX

FOLDER_MODE = 0o700
# Seconds; a process that was stopped may hold the lock for ever. A worker that has streams holds it
# for some MAX_APPEND_REST at a record, and those who wait get it in no order.
LOCK_WAIT = 10.0
LOCK_INTERVAL = 0.01  # seconds
DIGEST_CHARACTERS = 32  # of a digest, in the name of its folder
UNWRITTEN = "the prefix cache cannot be written to disk"  # logged, and named by docs/operate.md


class UnsafeFolder(OSError):
    """The folder is of another user, or others may write into it."""


class Locked(OSError):
    """Another process held the lock for longer than LOCK_WAIT."""


class DiskSettings(Struct, frozen=True):
    """Where the records of a model are, and how many bytes of them."""

    root: Path
    model: str
    budget: int


class SegmentFile(Struct, frozen=True):
    """A segment on the disk; `used` is when it was written or used last (seconds, epoch)."""

    path: Path
    size: int
    used: float


class ModelFolder:
    """The folder of a model's segments, of `budget` bytes together."""

    def __init__(self, root: Path, model: str, budget: int) -> None:
        self.root = root
        self.path = root / quote(model, safe="")
        self.budget = budget

    def prepare(self, digest: bytes) -> Path:
        """Makes the folder of a digest, and returns it.

        Raises UnsafeFolder, and OSError where it cannot be made.
        """
        folder = self.segments_of(digest)
        for path in (self.root, self.path, folder):
            path.mkdir(mode=FOLDER_MODE, parents=path is self.root, exist_ok=True)
            check_owner(path, 0o022 if path is self.root else 0o077)
        return folder

    @property
    def advice(self) -> str:
        """What an operator does where the folder cannot be written."""
        return (
            f"requests go on, and writing is tried again: make room in {self.path} and have it"
            " writable, or name another folder as prefix_dir"
        )

    def segments_of(self, digest: bytes) -> Path:
        """Returns the folder of the segments of a digest."""
        return self.path / digest.hex()[:DIGEST_CHARACTERS]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of the folder. Raises Locked, and OSError where it cannot be opened."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path / "lock", flags, FILE_MODE)
        try:
            until = time.monotonic() + LOCK_WAIT
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise Locked(f"another process holds {self.path / 'lock'}") from None
                    time.sleep(LOCK_INTERVAL)
            yield
        finally:
            os.close(descriptor)

    def make_room(self, needed: int, spare: Path | None = None) -> bool:
        """Deletes the segments that were used least recently until `needed` bytes fit.

        Never the segment `spare`. The caller holds the lock. Returns whether they fit.
        """
        found = sorted(self.files(), key=lambda one: (one.used, one.path.name))
        total = sum(one.size for one in found)
        for one in found:
            if total + needed <= self.budget:
                break
            if one.path != spare:
                one.path.unlink(missing_ok=True)
                total -= one.size
                with contextlib.suppress(OSError):
                    one.path.parent.rmdir()  # of a digest that has no segments any more
        return total + needed <= self.budget

    def files(self) -> list[SegmentFile]:
        """Returns all segments of the model, of whatever digest."""
        return list(self.each())

    def each(self) -> Iterator[SegmentFile]:
        """Yields all segments of the model, of whatever digest."""
        return segment_files(self.path)


def segment_files(folder: Path) -> Iterator[SegmentFile]:
    """Yields the segments in the folder of a model.

    What disappears meanwhile, and folders that this user may not read, are left out.
    """
    for inner in _entries(folder, PermissionError):
        if not inner.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(Path(inner.path), PermissionError):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX) and stat.S_ISREG(status.st_mode):
                    yield SegmentFile(Path(entry.path), status.st_size, status.st_mtime)


def models_in(root: Path) -> dict[str, Path]:
    """Returns the folders of models in a folder of segments, by the name of the model."""
    found = [Path(entry.path) for entry in _entries(root) if entry.is_dir(follow_symlinks=False)]
    return {unquote(path.name): path for path in sorted(found)}


def check_owner(path: Path, forbidden: int) -> None:
    """Raises UnsafeFolder unless the folder is this user's, with no bit of the mode `forbidden`.

    What others could write there would become the words of answers.
    """
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFolder(f"{path} is no folder")
    if status.st_uid != os.getuid():
        raise UnsafeFolder(
            f"{path} belongs to the user {status.st_uid}, and this process runs as {os.getuid()};"
            " name another folder with prefix_dir"
        )
    if status.st_mode & forbidden:
        raise UnsafeFolder(
            f"{path} has the mode {status.st_mode & 0o7777:04o}, with which other users reach what"
            f" conversations left there: chmod 700 {shlex.quote(str(path))}"
        )


def _entries(folder: Path, *ignored: type[OSError]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ignored:
        return []
