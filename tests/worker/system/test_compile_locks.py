"""Tests the lock of a kernel's file: a single holder, and file systems without locks."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from mlxpool.worker.system.compile_locks import compile_lock


def test_one_holder_at_a_time_and_no_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "kernel.ptx"
    with compile_lock(path, wait=False) as first, compile_lock(path, wait=False) as second:
        assert (first, second) == (True, False)
    with compile_lock(path, wait=False) as again:
        assert again
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without locks each process compiles for itself, and nobody waits."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "kernel.ptx"
    with compile_lock(path, wait=True) as first, compile_lock(path, wait=True) as second:
        assert first and second
    assert not list(tmp_path.iterdir())
