"""What the kernel knows of a process: one small function each, with a twin where Linux is missing.

None of them raises for a process that is gone: then they know nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

LINUX = sys.platform == "linux"
_PAGE = os.sysconf("SC_PAGE_SIZE")


def run_queue_wait_ns(pid: int, thread: int) -> int:
    """Nanoseconds that a thread was ready to run and did not get a CPU; 0 where unknown."""
    if not LINUX or not thread:
        return 0
    text = _read(f"/proc/{pid}/task/{thread}/schedstat").split()
    return int(text[1]) if len(text) > 1 else 0


def stopped(pid: int) -> bool:
    """Whether a signal or a debugger holds the process."""
    if LINUX:
        return _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1] in ("T", "t")
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def resident(pid: int) -> int:
    """Bytes of memory that the process holds; 0 where unknown."""
    if LINUX:
        text = _read(f"/proc/{pid}/statm").split()
        return int(text[1]) * _PAGE if len(text) > 1 else 0
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def start_time(pid: int) -> float | None:
    """When the process began; together with its pid it names a process for ever."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def oom_kills() -> int:
    """Processes that the kernel has killed for memory, in our control group and in the machine."""
    if not LINUX:
        return 0
    return sum(_counter(path) for path in (*_memory_events(), Path("/proc/vmstat")))


def _memory_events() -> list[Path]:
    files = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            files.append(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"))
    return files


def _counter(path: Path) -> int:
    for line in _read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return 0


def memory_of_machine() -> int:
    """Bytes."""
    return int(psutil.virtual_memory().total)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return ""
