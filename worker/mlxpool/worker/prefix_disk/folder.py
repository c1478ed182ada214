"""The folder of the segments of one model: owner, modes, size bound, deletions.

The path of a segment is DIR/MODEL/DIGEST/NAME.seg; MODEL is the quoted model name. The size bound
applies to all segments of a model, whatever their digest. A digest covers the weights, the version
of the computation, and the layout of cached arrays. Segments of other digests than the worker's are
deleted first, because no worker uses them. Workers take the lock DIR/MODEL/lock to append and to
delete.
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
# The most seconds of a wait for the lock: a stopped process may hold it for ever. A worker with
# streams holds the lock for about MAX_APPEND_REST per record; waiting processes get it in any
# order.
LOCK_WAIT = 10.0
LOCK_INTERVAL = 0.01  # seconds between two attempts to take the lock
DIGEST_CHARACTERS = 32  # characters of a digest in the name of its folder
UNWRITTEN = "the prefix cache cannot be written to disk"  # log text, quoted in docs/operate.md


class UnsafeFolder(OSError):
    """The folder belongs to another user, or its mode gives access to other users."""


class Locked(OSError):
    """Another process has held the lock for longer than LOCK_WAIT."""


class DiskSettings(Struct, frozen=True):
    """The folder for a model's records, and the most bytes of these records."""

    root: Path
    model: str
    budget: int


class SegmentFile(Struct, frozen=True):
    """A segment on the disk; `used`: time of the last write or use, in Unix seconds."""

    path: Path
    size: int
    used: float


class ModelFolder:
    """The folder of a model's segments, which together have at most `budget` bytes."""

    def __init__(self, root: Path, model: str, budget: int) -> None:
        self.root = root
        self.path = root / quote(model, safe="")
        self.budget = budget

    def prepare(self, digest: bytes) -> Path:
        """Makes the folder of a digest, and returns the folder's path.

        Raises UnsafeFolder. Raises OSError if the folder cannot be made.
        """
        folder = self.segments_of(digest)
        for path in (self.root, self.path, folder):
            path.mkdir(mode=FOLDER_MODE, parents=path is self.root, exist_ok=True)
            check_owner(path, 0o022 if path is self.root else 0o077)
        return folder

    @property
    def advice(self) -> str:
        """The advice for operators if the folder cannot be written."""
        return (
            f"requests go on, and writing is tried again: make room in {self.path} and have it"
            " writable, or name another folder as prefix_dir"
        )

    def segments_of(self, digest: bytes) -> Path:
        """Returns the folder that has the segments of a digest."""
        return self.path / digest.hex()[:DIGEST_CHARACTERS]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Returns a context in which this process holds the lock of the folder.

        Raises Locked if another process does not release the lock, and OSError if the lock cannot
        be opened.
        """
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
        """Deletes least recently used segments, except `spare`, until there is room.

        Returns whether there is room for `needed` bytes within `budget`. The caller holds the lock.
        """
        files = sorted(self.files(), key=lambda file: (file.used, file.path.name))
        total = sum(file.size for file in files)
        for file in files:
            if total + needed <= self.budget:
                break
            if file.path != spare:
                file.path.unlink(missing_ok=True)
                total -= file.size
                with contextlib.suppress(OSError):
                    file.path.parent.rmdir()  # if the digest has no segments left
        return total + needed <= self.budget

    def files(self) -> list[SegmentFile]:
        """Returns all segments of the model, of all digests."""
        return list(self.each())

    def each(self) -> Iterator[SegmentFile]:
        """Yields all segments of the model, of all digests."""
        return segment_files(self.path)


def segment_files(folder: Path) -> Iterator[SegmentFile]:
    """Yields the segments in the folder of a model.

    Leaves out files that disappear meanwhile, and folders that this user may not read.
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
    """Returns the folder of each model in `root`, by the name of the model."""
    folders = [Path(entry.path) for entry in _entries(root) if entry.is_dir(follow_symlinks=False)]
    return {unquote(path.name): path for path in sorted(folders)}


def check_owner(path: Path, forbidden: int) -> None:
    """Raises UnsafeFolder unless the folder is this user's and its mode has no `forbidden` bit.

    Users with write access to the folder could determine the text of answers.
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
            f"{path} has the mode {status.st_mode & 0o7777:04o}, so other users can reach the"
            f" conversations in it: chmod 700 {shlex.quote(str(path))}"
        )


def _entries(folder: Path, *ignored: type[OSError]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except ignored:
        return []
