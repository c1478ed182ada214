"""A command that ends with the process that started it."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from mlxpool.cluster import tied_process
from support.pool import PATIENCE, gone, until

PROGRAM = "import signal,sys,time; signal.signal(15, {handler}); print('up', flush=True); {rest}"
WAITS = PROGRAM.format(handler="lambda *_: sys.exit(7)", rest="time.sleep(600)")
STUBBORN = PROGRAM.format(handler="signal.SIG_IGN", rest="time.sleep(600)")


def tied(code: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "mlxpool.cluster.tied_process"),
            *(sys.executable, "-c", code),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def child_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children()
    return child


def close(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    return process.wait(PATIENCE)


@pytest.mark.parametrize(("code", "exit_code"), [(WAITS, 7), (STUBBORN, 128 + signal.SIGKILL)])
def test_it_ends_with_standard_input(code: str, exit_code: int) -> None:
    process = tied(code)
    child = child_of(process)
    assert close(process) == exit_code
    assert gone(child)


def test_it_hands_a_signal_on_and_ends_as_its_command_does() -> None:
    process = tied(WAITS)
    child = child_of(process)
    process.terminate()
    until(lambda: process.poll() is not None, "it has ended")
    assert close(process) == 7
    assert gone(child)


def test_its_command_can_be_killed() -> None:
    process = tied(STUBBORN)
    child = child_of(process)
    tied_process.kill(process)
    until(lambda: gone(child), "its command is gone")
    assert close(process) == 128 + signal.SIGKILL


def test_a_killed_starter_takes_the_command_with_it() -> None:
    """The command ends when its standard input closes: the killed process had the other end."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess,sys,time;"
            f"p=subprocess.Popen([sys.executable,'-P','-m','mlxpool.cluster.tied_process',"
            f"sys.executable,'-c',{WAITS!r}],stdin=subprocess.PIPE);"
            "time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
    below = psutil.Process(holder.pid).children(recursive=True)
    assert len(below) == 2
    holder.kill()
    holder.wait()
    holder.stdout.close()
    until(lambda: all(gone(each) for each in below), "both have ended")
