"""The folder of compiled GPU kernels, which only the user of this process may reach.

What lies there runs on the GPU under names that everybody can compute, and MLX asks nobody who has
written it. MLX's own default is a name in the temporary folder that any user may make first.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VARIABLE = "MLX_PTX_CACHE_DIR"  # names the folder, to MLX and to kernels/kernel_cache.py
FOLDER_MODE = 0o700
OTHERS_WRITE = 0o022
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")  # with which MLX computes on a GPU of NVIDIA

log = logging.getLogger("mlxpool.worker")


class UnsafeFolder(OSError):
    """Another user may have put something into the folder, or may put it there."""


def needed() -> bool:
    """Returns whether MLX may compile kernels for a GPU of NVIDIA: not with its CPU package."""
    if sys.platform != "linux":
        return False
    return any(map(_installed, CUDA_PACKAGES)) or not _installed("mlx-cpu")


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def use_private_folder(environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Makes the folder that MLX reads compiled kernels from one of this user alone.

    It is what VARIABLE names, else a folder in the temporary folder; where VARIABLE is empty, MLX
    keeps no kernels. One that other users can or could write to is not used: a fresh one is made,
    and the log says why. Returns the fresh one, which the caller removes when this process ends.
    Called before MLX computes, which reads VARIABLE then.
    """
    named = environment.get(VARIABLE)
    if named == "":
        return None
    folder = Path(named) if named else default_folder()
    try:
        make_private(folder)
    except OSError as error:
        fresh = Path(tempfile.mkdtemp(prefix="mlxpool-kernels-"))  # has FOLDER_MODE
        log.warning(
            "compiled kernels are not kept, each load compiles them: %s",
            error,
            extra={"folder": str(fresh)},
        )
        environment[VARIABLE] = str(fresh)
        return fresh
    environment[VARIABLE] = str(folder)
    return None


def remove(fresh: Path | None) -> None:
    """Removes what `use_private_folder` has returned."""
    if fresh is not None:
        shutil.rmtree(fresh, ignore_errors=True)


def default_folder() -> Path:
    """Returns this user's folder of the kernels of this version of MLX."""
    try:
        number = version("mlx")
    except PackageNotFoundError:
        number = "unknown"
    return Path(tempfile.gettempdir()) / f"mlxpool-{os.getuid()}" / "kernels" / number


def make_private(folder: Path) -> None:
    """Makes the folder with FOLDER_MODE, or takes other users' rights to read it away.

    Raises UnsafeFolder where it is not this user's or others may write to it or to a folder above,
    and OSError where it cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
    for one in reversed(missing):
        one.mkdir(mode=FOLDER_MODE, exist_ok=True)
    status = os.lstat(folder)
    advice = f"name another folder with {VARIABLE}"
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFolder(f"{folder} is no folder; {advice}")
    if status.st_uid != os.getuid():
        raise UnsafeFolder(
            f"{folder} belongs to the user {status.st_uid}, and this process runs as {os.getuid()};"
            f" {advice}"
        )
    if status.st_mode & OTHERS_WRITE:
        raise UnsafeFolder(
            f"{folder} has the mode {status.st_mode & 0o7777:04o}, with which other users may have"
            f" put kernels there: rm -r {shlex.quote(str(folder))}"
        )
    _require_safe_path(folder.resolve())
    if stat.S_IMODE(status.st_mode) != FOLDER_MODE:
        folder.chmod(FOLDER_MODE)


def _require_safe_path(folder: Path) -> None:
    """Raises UnsafeFolder where another user can rename one of the folders on the path."""
    for above in folder.parents:
        status = os.stat(above)
        foreign = status.st_uid not in (0, os.getuid())
        shared = status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
        if foreign or shared:
            raise UnsafeFolder(
                f"{folder} can be replaced by other users: {above} belongs to the user"
                f" {status.st_uid} and has the mode {status.st_mode & 0o7777:04o};"
                f" name another folder with {VARIABLE}"
            )
