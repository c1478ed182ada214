"""A small storm of faults over jobs; `large_storm.py --jobs` runs the largest."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.job_storm import CallStorm, JobStorm
from chaos.storm import Outcome, Plan
from worker.encoders.checkpoints import CASES, write


def check(storm: JobStorm, outcome: Outcome, faults: int) -> None:
    figures = {**outcome.figures, **storm.report()}
    assert outcome.findings.sound, figures
    assert storm.done_once, figures
    assert outcome.faults.total() == faults, figures


def test_a_storm_of_jobs(tmp_path: Path) -> None:
    storm = JobStorm(Plan(streams=300, faults=20, seed=1, at_once=12), tmp_path)
    check(storm, storm.run(), 20)


def test_a_storm_over_a_batch_of_embed_lines(tmp_path: Path) -> None:
    """The test takes 10 s of processor time, because two models are loaded again and again."""
    encoder = write(tmp_path / "encoder", CASES["bert"])
    plan = Plan(streams=120, faults=12, seed=3, at_once=6, replicas=1)
    storm = CallStorm(plan, tmp_path, encoder)
    check(storm, storm.run(), 12)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_larger_storm_of_jobs(tmp_path: Path) -> None:
    storm = JobStorm(Plan(streams=2000, faults=120, seed=2, at_once=24), tmp_path)
    check(storm, storm.run(), 120)
