"""The temporary folder of a pool's processes, which no other user can reach.

MLX writes compiled kernels to its temporary folder, and loads every file there that has the name of
a kernel. Everybody can compute these names. On a CPU the kernels are shared objects, whose code
runs as the user of the process. So a process that computes, or that starts such a process, first
sets TMPDIR to a folder to which other users cannot write and never could. The folder is the same at
each start, so a kernel is compiled once.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlxpool.common.paths import default_prefix_dir

TEMPORARY = "TMPDIR"
KERNELS = "MLX_PTX_CACHE_DIR"  # MLX's folder of compiled GPU kernels; default: in TMPDIR
INHERITED = "MLXPOOL_FRESH_TMPDIR"  # a new folder that a process made for itself and its children
FOLDER_MODE = 0o700
OTHERS_WRITE = 0o022
OTHERS = 0o077

log = logging.getLogger("mlxpool.private_temp")
_kept_open: list[int] = []  # descriptors of locked folders, which cleaners of /tmp skip


class UnsafeFolder(OSError):
    """Another user can write to the folder, or may have written to it."""


def use(run_dir: Path | None = None) -> Path:
    """Sets TMPDIR to a folder that only this user can reach, and returns the folder.

    The folder is the first of this list that is safe or can be made safe: the folder of TMPDIR, if
    other users cannot reach it; `tmp-…` in the user's folder of caches; `mlxpool-UID` in the
    temporary folder; `tmp` in the run directory (default: $MLXPOOL_RUN_DIR); a new folder, which is
    removed when this process ends. If a new folder is used, the log has the faults of the other
    folders.

    If a folder of GPU kernels is set in MLX_PTX_CACHE_DIR, other users lose the right to read it.
    If that folder is not safe, the variable is removed, so that MLX uses TMPDIR.

    Call this function before MLX is used, and before other threads run. Raises OSError naming the
    variable to set if no folder can be made.
    """
    folder = in_use() or _chosen(run_dir)
    os.environ[TEMPORARY] = str(folder)
    if named := os.environ.get(KERNELS):
        try:
            make_private(Path(named))
        except OSError as error:
            log.warning("compiled GPU kernels are kept in %s instead: %s", folder, error)
            del os.environ[KERNELS]
    return folder


def in_use() -> Path | None:
    """Returns the folder of TMPDIR if it is safe, or if the parent process made it; else None."""
    named = os.environ.get(TEMPORARY)
    if not named:
        return None
    folder = Path(named)
    try:
        _require_own(folder)
        if os.lstat(folder).st_mode & OTHERS:
            return None
        if os.environ.get(INHERITED) != named:
            _require_safe_path(folder.resolve())
    except OSError:
        return None
    return folder


def _chosen(run_dir: Path | None) -> Path:
    wrong = []
    for folder in _candidates(run_dir):
        try:
            make_private(folder)
            if folder.parent == shared_folder():
                _lock(folder)
            return folder
        except OSError as error:
            wrong.append(str(error))
    try:
        fresh = Path(tempfile.mkdtemp(prefix="mlxpool-", dir=shared_folder()))
    except OSError:
        raise OSError(
            f"no folder for temporary files can be used: {'; '.join(wrong)}; set {TEMPORARY} to a"
            " folder that this user can write to"
        ) from None
    _lock(fresh)
    os.environ[INHERITED] = str(fresh)
    atexit.register(_remove, fresh, os.getpid())
    log.warning("compiled kernels are not kept, the next start compiles them: %s", "; ".join(wrong))
    return fresh


def _candidates(run_dir: Path | None) -> Iterator[Path]:
    yield default_prefix_dir().with_name(f"tmp-{os.uname().machine}-{_c_library()}")
    yield shared_folder() / f"mlxpool-{os.getuid()}"
    named = run_dir or os.environ.get("MLXPOOL_RUN_DIR")
    if named:
        yield Path(named).absolute() / "tmp"


def _c_library() -> str:
    """Returns the C library's name. Machines with different C libraries cannot share kernels."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or sys.platform).replace(" ", "-")
    except ValueError:
        return sys.platform


def shared_folder() -> Path:
    """Returns the folder of TMPDIR if it exists, else /tmp."""
    named = os.environ.get(TEMPORARY)
    return Path(named if named and os.path.isdir(named) else "/tmp")


def _lock(folder: Path) -> None:
    """Locks a folder in the temporary folder until this process ends.

    systemd-tmpfiles removes old folders, but no locked folders. After a removal, another user could
    make a folder with the same name.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _kept_open.append(descriptor)


def _remove(fresh: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child does not remove the folder
        shutil.rmtree(fresh, ignore_errors=True)


def make_private(folder: Path) -> None:
    """Makes the folder with FOLDER_MODE, or removes the right of other users to read it.

    Raises UnsafeFolder if the folder belongs to another user, or if other users may write to it or
    to a folder above it. Raises OSError if the folder cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=FOLDER_MODE, exist_ok=True)
    _require_own(folder)
    mode = stat.S_IMODE(os.lstat(folder).st_mode)
    if mode & OTHERS_WRITE:
        raise UnsafeFolder(
            f"{folder} has the mode {mode:04o}, with which other users may have put code there:"
            f" rm -r {shlex.quote(str(folder))}"
        )
    _require_safe_path(folder.resolve())
    if mode != FOLDER_MODE:
        folder.chmod(FOLDER_MODE)


def _require_own(folder: Path) -> None:
    """Raises UnsafeFolder if the path is not a folder, or belongs to another user."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFolder(f"{folder} is no folder")
    if status.st_uid != os.getuid():
        raise UnsafeFolder(
            f"{folder} belongs to the user {status.st_uid}, and this process runs as {os.getuid()}"
        )


def _require_safe_path(folder: Path) -> None:
    """Raises UnsafeFolder if another user can rename a folder on the path."""
    for above in folder.parents:
        status = os.stat(above)
        foreign = status.st_uid not in (0, os.getuid())
        shared = status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
        if foreign or shared:
            raise UnsafeFolder(
                f"{folder} can be replaced by other users: {above} belongs to the user"
                f" {status.st_uid} and has the mode {stat.S_IMODE(status.st_mode):04o}"
            )
