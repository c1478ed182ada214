"""Beats of remote workers in place of observations from outside."""

from __future__ import annotations

import pytest

from mlxpool.broker.processes.remote_workers import sample_of
from mlxpool.common.progress import ProgressReading
from mlxpool.common.protocol.from_worker import Beat


def test_a_beat_becomes_a_sample() -> None:
    beat = {"phase": "prefill", "progress": 3, "look": [512, False, 1000, 2000]}
    assert sample_of(Beat.parse(beat)).look == ProgressReading(
        "prefill", 0, 3, 512, False, 1000, 2000
    )


def test_before_its_first_beat_a_worker_is_loading() -> None:
    assert sample_of(Beat()).look.phase == "load"


@pytest.mark.parametrize(
    "beat",
    [
        {"phase": "holiday"},
        {"phase": 7, "progress": 1},
        {"phase": "decode", "progress": "x"},
        {"phase": "decode", "look": "x"},
        {"phase": "decode", "look": [1, 2]},
        {"phase": ["decode"]},
    ],
)
def test_odd_values_of_a_beat_raise_no_error(beat: dict[str, object]) -> None:
    assert sample_of(Beat.parse(beat)).look.count == 0 or beat.get("progress")
