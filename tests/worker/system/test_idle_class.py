"""The scheduling class for long work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlxpool.worker.system.idle_class import become_idle_class


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such class")
def test_a_process_enters_the_idle_class() -> None:
    """In a separate process, because a process cannot leave the class."""
    code = """
import os
from mlxpool.worker.system.idle_class import become_idle_class
assert become_idle_class()
assert os.sched_getscheduler(0) == os.SCHED_IDLE
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not become_idle_class()
