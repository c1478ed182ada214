"""The folder of the store, with its lock, its databases and its reserve file.

A folder on a network file system is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from mlxpool.broker.store.records import StoreInUse, StoreUnusable, StoreUnwritable
from mlxpool.common.closing import Closing
from mlxpool.common.files import FolderLocked, lock_folder

RESERVE_BYTES = 64 * 1024 * 1024  # bytes of the reserve: on a full disk even deletions need room
# File systems on which a lock or an fsync may not be valid for other machines.
NETWORK = frozenset(
    {
        *("9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "gpfs", "lustre"),
        *("ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "webdav"),
        *("fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
        *("macfuse", "osxfuse"),
    }
)
_DATABASE = re.compile(r"jobs-(\d+)\.db")


class StateDir(Closing):
    """The folder of the store. It is created if missing, and locked for the life of this object.

    Raises StoreInUse if another broker has locked it, StoreUnwritable if this user cannot write
    into it, and StoreUnusable if it is on a network file system.
    """

    def __init__(self, path: Path, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.path = path
        self._reserve_bytes = reserve_bytes
        create(path)
        check_file_system(path)
        self._lock = _lock(path)

    # ---- databases -----------------------------------------------------------------------------

    def database(self) -> Path:
        """Returns the path of the newest database, or of the first database in an empty folder.

        Databases are numbered: `jobs-1.db`. The copy that replaces a damaged database gets the next
        number in one rename, so the logs of the two databases are never mixed.
        """
        return self.path / f"jobs-{max(self._numbers(), default=1)}.db"

    def replacement(self) -> Path:
        """Returns the path of the next database; `replace` moves a copy there."""
        return self.path / f"jobs-{max(self._numbers(), default=0) + 1}.db"

    def replace(self, made: Path) -> Path:
        """Makes a complete copy the newest database, then deletes all older databases."""
        older = [self.path / f"jobs-{number}.db" for number in self._numbers()]
        target = self.replacement()
        for suffix in ("-wal", "-shm", "-journal"):
            target.with_name(target.name + suffix).unlink(missing_ok=True)
        sync(made)
        os.rename(made, target)
        sync(self.path)
        for old in older:
            for suffix in ("", "-wal", "-shm", "-journal"):
                old.with_name(old.name + suffix).unlink(missing_ok=True)
        return target

    def _numbers(self) -> list[int]:
        matches = (_DATABASE.fullmatch(name) for name in os.listdir(self.path))
        return [int(match[1]) for match in matches if match]

    # ---- the reserve ---------------------------------------------------------------------------

    @property
    def _reserve(self) -> Path:
        return self.path / "reserve"

    def hold_reserve(self) -> bool:
        """Allocates the reserve file if the disk has room for twice its size.

        Returns whether the file exists.
        """
        if self._reserve.exists():
            return True
        if self.free_bytes() < 2 * self._reserve_bytes:
            return False
        new = self._reserve.with_suffix(".new")
        try:
            _allocate(new, self._reserve_bytes)
            os.rename(new, self._reserve)
        except OSError:
            new.unlink(missing_ok=True)
            return False
        return True

    def free_reserve(self) -> bool:
        """Deletes the reserve file, so that the database has room. Returns whether it existed."""
        held = self._reserve.exists()
        self._reserve.unlink(missing_ok=True)
        return held

    def free_bytes(self) -> int:
        """Returns the bytes that the file system has free for this user."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Releases the lock of the folder."""
        os.close(self._lock)


def create(path: Path) -> None:
    """Creates the folder for this user alone, and syncs it to the disk.

    Raises StoreUnwritable if the path cannot be created, is no folder or belongs to another user.
    """
    try:
        if not path.exists():
            path.mkdir(mode=0o700, parents=True)
        sync(path)
        sync(path.parent)
        owner = path.stat().st_uid
    except OSError as error:
        raise StoreUnwritable(f"the folder of the store of jobs cannot be made: {error}") from None
    if not path.is_dir():
        raise StoreUnwritable(f"state_dir {path} is no folder; give one, or a path to make it at")
    if owner != os.geteuid():
        raise StoreUnwritable(f"{path} belongs to uid {owner}, this is uid {os.geteuid()}")


def make_private(path: Path) -> None:
    """Creates an empty file that no other user can read, unless the file exists. Raises OSError."""
    # An existing file is not opened: closing its descriptor would end this process's locks on it.
    if not path.exists():
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def sync(path: Path) -> None:
    """Syncs a file or a folder to the disk, past the drive's cache. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves data in the drive's cache
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_system(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> str:
    """Returns the type of the file system of a path; "" if unknown.

    `mounts` are pairs of mount point and type, by default the mounts of this machine.
    """
    if mounts is None:
        partitions = psutil.disk_partitions(all=True)
        mounts = [(partition.mountpoint, partition.fstype) for partition in partitions]
    real = os.path.realpath(path)
    best, kind = -1, ""
    for point, fstype in mounts:
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # the last mount on a point is the visible mount
            best, kind = len(point), fstype
    return kind


def check_file_system(path: Path, mounts: Iterable[tuple[str, str]] | None = None) -> None:
    """Raises StoreUnusable if the path is on a network file system."""
    kind = file_system(path, mounts)
    if kind in NETWORK:
        raise StoreUnusable(
            f"state_dir {path} is on {kind}, a network file system: locks and fsync do not hold"
            " there; give a folder on a local disk, or use PostgreSQL"
        )


def _lock(path: Path) -> int:
    try:
        return lock_folder(path)
    except FolderLocked as locked:
        raise StoreInUse(
            f"another broker (pid {locked.holder}) has the store of jobs in {path}; stop it, or"
            " give another state_dir"
        ) from None
    except OSError as error:
        raise StoreUnwritable(
            f"the folder of the store of jobs cannot be locked: {error}"
        ) from None


def _allocate(path: Path, size: int) -> None:
    """Creates a file of `size` bytes whose blocks are allocated on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            block = os.urandom(1 << 20)  # a file system may allocate no blocks for zeros
            for start in range(0, size, len(block)):
                os.write(descriptor, block[: size - start])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
