"""Queries to the operating system about processes and this machine.

Each function that only Linux supports has a portable variant. No function raises if the process has
ended: it then returns the value that stands for unknown.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import psutil

from mlxpool.common.config.schema import PoolConfig

LINUX = sys.platform == "linux"
DEFAULT_SHARE = 0.8  # share of the machine's memory for workers without a set limit
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def run_queue_wait_ns(pid: int, thread: int) -> int:
    """Returns the nanoseconds for which a thread was ready to run without a CPU; 0 if unknown."""
    if not LINUX or not thread:
        return 0
    text = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
    return int(text[1]) if len(text) > 1 else 0


def is_stopped(pid: int) -> bool:
    """Returns whether a signal or a debugger has stopped the process."""
    if LINUX:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] in ("T", "t")
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def resident_bytes(pid: int) -> int:
    """Returns the resident bytes of a process; 0 if unknown."""
    if LINUX:
        text = _read(f"/proc/{pid}/statm").split()
        return int(text[1]) * _PAGE_BYTES if len(text) > 1 else 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def trim_heap() -> None:
    """Gives free memory of the C library back to the operating system, if possible."""
    if LINUX:
        with contextlib.suppress(AttributeError, OSError):  # other C libraries lack malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def start_time(pid: int) -> float | None:
    """Returns the start time of a process, by which a reused pid is recognised; None if unknown."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def oom_kills() -> int:
    """Returns the number of out-of-memory kills, which rises with each kill.

    It is the sum of the kernel's counts for this control group and for this machine.
    """
    if not LINUX:
        return 0
    return sum(oom_kills_in(path) for path in (*_memory_event_files(), Path("/proc/vmstat")))


def _memory_event_files() -> list[Path]:
    files = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return files


def oom_kills_in(path: Path) -> int:
    """Returns the out-of-memory kills that a file of the kernel counts; 0 if it has no count."""
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return 0


def machine_memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""


def memory_limit_bytes(config: PoolConfig) -> int:
    """Returns the bound on the memory of all workers together, in bytes."""
    return config.memory_limit or int(DEFAULT_SHARE * machine_memory_bytes())
