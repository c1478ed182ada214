"""A broker as a systemd service: its notifications, and their absence when it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from support.notify_socket import NotifySocket
from support.pool import PATIENCE, Pool, until

WATCHDOG = 0.2  # seconds
CONFIG = """
[pool]
metrics = "127.0.0.1:0"
"""


def service(tmp_path: Path, manager: NotifySocket) -> Pool:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": str(int(WATCHDOG * 1e6)),
    }
    return Pool(tmp_path, CONFIG, environment=environment)


def test_the_notifications_of_a_service(tmp_path: Path) -> None:
    heard: list[str] = []

    def hears(word: str) -> bool:
        heard.extend(manager.received())
        return any(said.startswith(word) for said in heard)

    with NotifySocket(str(tmp_path / "notify")) as manager:
        with service(tmp_path, manager) as pool:
            until(lambda: hears("WATCHDOG=1"), "a watchdog")
            assert heard[0] == "READY=1", "it was bound before it said anything"
            until(lambda: hears("STATUS=ready: workers 0"), "a status")
            with pool.client() as client:
                client.generate("counting", "hello", max_tokens=3)
            worker = int(pool.worker("counting/0")["pid"])
            variables = Path(f"/proc/{worker}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in variables and b"WATCHDOG_USEC" not in variables
            assert not hears("STOPPING=1")
        assert hears("STOPPING=1")


def test_a_stopped_loop_sends_no_watchdog(tmp_path: Path) -> None:
    with NotifySocket(str(tmp_path / "notify")) as manager, service(tmp_path, manager) as pool:
        until(lambda: "WATCHDOG=1" in manager.received(), "a watchdog")
        assert pool.process is not None
        os.kill(pool.process.pid, signal.SIGSTOP)
        try:
            stat = Path(f"/proc/{pool.process.pid}/stat")
            until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
            manager.received()
            time.sleep(5 * WATCHDOG)
            assert manager.received() == []
        finally:
            os.kill(pool.process.pid, signal.SIGCONT)
        until(lambda: "WATCHDOG=1" in manager.received(), "it goes on")


# The restrictions of MemoryDenyWriteExecute=yes and NoNewPrivileges=yes.
TIGHT = """
import ctypes, os, sys
MDWE, NO_NEW_PRIVILEGES = 65, 38
control = ctypes.CDLL(None, use_errno=True).prctl
assert control(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
if control(MDWE, 1, 0, 0, 0) != 0:
    sys.exit("no such kernel")
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_broker_without_writable_executable_memory(tmp_path: Path) -> None:
    prefix = (sys.executable, "-c", TIGHT)
    if b"no such" in subprocess.run([*prefix, "/bin/true"], capture_output=True).stderr:
        pytest.skip("this kernel cannot forbid it: Linux 6.3 or newer can")
    with Pool(tmp_path, CONFIG, prefix=prefix) as pool, pool.client() as client:
        assert client.generate("counting", "hello", max_tokens=3).reason == "length"
        with urllib.request.urlopen(pool.ask("ps")["broker"]["metrics"], timeout=PATIENCE) as page:
            assert page.status == 200
