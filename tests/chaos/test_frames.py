"""Garbage, duplicate, late and stale frames of a worker do not reach a client."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.harness import Chaos, model


@pytest.mark.parametrize("name", ["garbage", "duplicate", "late", "stale"])
def test_bad_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = model(fault=name, fault_in="send", fault_at=10, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(60, 3)
        chaos.assert_all_done()
        frames = chaos.pool.ask("stats")["frames"]
        counted = {"garbage": frames["bad"], "stale": frames["fenced"]}
        if name in counted:
            assert counted[name] > 0
        else:
            assert "it sent position" in chaos.causes()[0]
