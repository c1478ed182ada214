"""Runs a Python program on a logged disk, which a test can make full, slow or faulty.

A preloaded library replaces the libc calls with which SQLite writes. Other methods do not fit: a
FUSE file system needs rights that tests do not have, a VFS of SQLite needs another build of SQLite
than users have, and strace sees calls but cannot block them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from mlxpool.common.closing import Closing
from support.pool import PATIENCE, until

SOURCE = Path(__file__).with_suffix(".cpp")
TESTS = Path(__file__).parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++")
NO_BOUND = -1


@cache
def library() -> Path:
    """Builds the library, once per process. Skips the test if this fails."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the calls of libc are replaced by preloading, as on Linux")
    if COMPILER is None:
        pytest.skip("a C++ compiler is not installed, which builds the library to preload")
    folder = Path(tempfile.mkdtemp(prefix="mlxpool-shim-"))
    built = folder / "disk_shim.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE"]
    subprocess.run([COMPILER, *flags, "-o", built, SOURCE, "-ldl"], check=True, timeout=PATIENCE)
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return built


class ShimmedDisk(Closing):
    """Controls the faults of the disk below `root`, for processes that have `environment`."""

    def __init__(self, root: Path, log: Path | None = None, room: int = NO_BOUND) -> None:
        root.mkdir(exist_ok=True)
        control = root.with_name(root.name + ".control")
        control.write_bytes(struct.pack("<4q", 0, room, 0, 0))
        self._control_file = control.open("r+b")
        self._control = mmap.mmap(self._control_file.fileno(), 32)
        self.environment = {
            "LD_PRELOAD": str(library()),
            "DISK_SHIM_ROOT": str(root.resolve()),
            "DISK_SHIM_CONTROL": str(control),
        }
        if log is not None:
            self.environment["DISK_SHIM_LOG"] = str(log)

    def _set(self, index: int, value: int) -> None:
        self._control[8 * index : 8 * index + 8] = struct.pack("<q", value)

    def _get(self, index: int) -> int:
        return int(struct.unpack("<q", self._control[8 * index : 8 * index + 8])[0])

    def stall(self, on: bool) -> None:
        """Blocks every write and sync, or unblocks them."""
        self._set(0, int(on))

    def until_stalled(self) -> None:
        """Waits until a call is blocked."""
        until(lambda: self._get(3) > 0, "a call waits for the disk")

    def leave(self, room: int) -> None:
        """Sets the number of free bytes of the disk; NO_BOUND removes the limit."""
        self._set(1, room)

    def fail_syncs(self, count: int) -> None:
        """Makes the next `count` syncs fail with EIO."""
        self._set(2, count)

    def close(self) -> None:
        self._control.close()
        self._control_file.close()


class ShimmedProcess(ShimmedDisk):
    """A program of tests/support in a new process, with `room` bytes of disk for folder `root`.

    `line` reads its output; `tell` writes to its input.
    """

    def __init__(
        self, module: str, root: Path, *flags: str, log: Path | None = None, room: int = NO_BOUND
    ) -> None:
        super().__init__(root, log, room)
        path = os.pathsep.join([str(TESTS), *sys.path])
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"support.{module}", str(root), *flags],
            env={**os.environ, **self.environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def line(self) -> str:
        """Returns the next line of the program's output; "" at the end of the output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, text: str) -> None:
        """Writes a line to the program's input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def ask(self, text: str) -> str:
        """Writes a line to the program's input; returns the line that the program prints."""
        self.tell(text)
        return self.line()

    def wait(self) -> int:
        """Waits for the end of the program; returns the exit status."""
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Sends SIGKILL to the program."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        super().close()
