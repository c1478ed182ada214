"""Histories for checkers: off by default, one write a line, errors ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlxpool.common.trace import VARIABLE, History


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]


def test_off_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    history = History("broker")
    history.write("nothing")
    assert not history.on
    assert lines(tmp_path) == []


def test_the_fields_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    history = History("worker-m/0")
    history.write("work", id=bytes([0xAB] * 16), count=3)
    history.write("end")
    history.close()
    history.write("late")
    first, second = lines(tmp_path)
    assert (first["who"], first["what"], first["pid"]) == ("worker-m/0", "work", os.getpid())
    assert first["id"] == "ab" * 16 and first["count"] == 3
    assert float(str(first["t"])) <= float(str(second["t"]))


def test_a_full_disk_loses_the_line_only(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("missing program: /dev/full, a file system that is always full")
    (tmp_path / f"broker-{os.getpid()}.jsonl").symlink_to("/dev/full")
    history = History("broker", str(tmp_path))
    history.write("work")
    assert history.on
    history.close()
