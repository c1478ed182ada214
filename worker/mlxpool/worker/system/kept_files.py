"""Files that keep measurements and tokenizer data of a load, for later loads of the same model.

The files are beside the compiled kernels, in this user's private temporary folder. If TMPDIR names
another folder, nothing is kept. Each file has a key, and is valid only for this key. A file that is
broken or not a regular file is not read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlxpool.worker
from mlxpool.common.process import private_temp
from mlxpool.common.version import VERSION
from mlxpool.worker.versions import version_of

Key = Mapping[str, Any]  # values of JSON's types

FOLDER = "loads"  # name of the folder in the temporary folder
MAX_FILES = 64  # files of all models and settings; the least recently used are removed
MAX_BYTES = 64 * 2**20  # largest file that is read
MAX_AHEAD = 60.0  # seconds by which the clock of a file server may be ahead of this machine's clock
MAGIC = b"mlxpool kept 1\n"  # first bytes of a file, with the version of its format
_DIGEST_BYTES = 32
# The beginnings of variables that decide what MLX compiles, how a product is divided between cores,
# and what memory both take.
_VARIABLES = ("LD_PRELOAD", "MLX_", "OMP_", "OPENBLAS_")

log = logging.getLogger("mlxpool.worker")


class KeptFile:
    """A file that keeps content for a key; several processes may use it at once.

    `kind`: a word for the content, in the file's name. `path` is None if the user has no private
    temporary folder.
    """

    def __init__(self, kind: str, key: Key) -> None:
        self._key = json.dumps(key, sort_keys=True).encode()
        name = f"{kind}-{hashlib.sha256(self._key).hexdigest()[:32]}"
        folder = private_temp.in_use()
        self.path = None if folder is None else folder / FOLDER / name

    def read(self) -> bytes | None:
        """Returns the content for this key; None: no content, or the file is broken (logged)."""
        if self.path is None:
            return None
        try:
            data = _contents(self.path)
        except OSError:
            return None
        head = len(MAGIC) + _DIGEST_BYTES
        digest, body = data[len(MAGIC) : head], data[head:]
        if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            self.refuse("its checksum is another")
            return None
        key, _, content = body.partition(b"\n")
        if key != self._key:
            return None
        with contextlib.suppress(OSError):
            os.utime(self.path)
        return content

    def refuse(self, why: str) -> None:
        """Logs why the content is not used, and removes the file."""
        assert self.path is not None
        log.warning(
            "kept results of an earlier load are not used",
            extra={"why": why, "file": str(self.path)},
        )
        with contextlib.suppress(OSError):
            self.path.unlink()

    def write(self, content: bytes) -> None:
        """Keeps the content; other processes see all of it or nothing. Logs a failure."""
        if self.path is None:
            return
        body = self._key + b"\n" + content
        data = MAGIC + hashlib.sha256(body).digest() + body
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=".new-")
            try:
                with open(descriptor, "wb") as stream:
                    stream.write(data)
                os.replace(name, self.path)
            except BaseException:
                os.unlink(name)
                raise
            _remove_oldest(self.path.parent)
        except OSError as error:
            log.warning(
                "the results of this load are not kept for the next load",
                extra={"why": str(error), "file": str(self.path)},
            )


def _contents(file: Path) -> bytes:
    """Returns the bytes of a file.

    Raises OSError if it is larger than MAX_BYTES or not a regular file: reading a pipe may block.
    """
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise OSError(f"{file} is not a regular file of at most {MAX_BYTES} bytes")
    return file.read_bytes()


def _remove_oldest(folder: Path) -> None:
    """Deletes all but the newest MAX_FILES files.

    A file with a time in the future, from a wrong clock, is treated as the oldest.
    """
    now, used = time.time(), []
    for file in folder.iterdir():
        with contextlib.suppress(OSError):  # another process has removed the file
            at = file.lstat().st_mtime
            used.append((0.0 if at > now + MAX_AHEAD else at, file))
    for _, file in sorted(used, reverse=True)[MAX_FILES:]:
        with contextlib.suppress(OSError):  # already removed, or a folder
            file.unlink()


@cache
def code() -> dict[str, str]:
    """Returns the part of a key that changes with any source file of the worker."""
    digest = hashlib.sha256(VERSION.encode())
    root = Path(mlxpool.worker.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(os.fsencode(f"{file}:{_stamp(file)}\n"))
    return {"code": digest.hexdigest()}


@cache
def machine() -> dict[str, Any]:
    """Returns the part of a key for the machine, and for the libraries and device of MLX."""
    return {
        **code(),
        "mlx": version_of("mlx"),
        "numpy": version_of("numpy"),
        "system": [sys.platform, platform.machine(), platform.release()],
        "cpu": _cpu(),
        "cores": _cores(),
        "compiler": shutil.which("g++"),  # on a CPU, MLX compiles fused operations with it
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)
        },
        "preloaded": [_stamp(Path(file)) for file in _preloaded()],
    }


def _preloaded() -> list[str]:
    """Returns the libraries in LD_PRELOAD, which are loaded first; one of them may be the BLAS."""
    return [file for file in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if file]


def _stamp(file: Path) -> tuple[int, int]:
    """Returns the size and the time of change of a file; zeros without a file."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    """Returns the processor's name, as far as the system reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor()
