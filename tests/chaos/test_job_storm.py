"""A small storm of faults over jobs; bench/job_storm.py runs the largest."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.job_storm import JobStorm
from chaos.storm import Outcome, Plan


def check(storm: JobStorm, outcome: Outcome, faults: int) -> None:
    figures = {**outcome.figures, **storm.report()}
    assert outcome.findings.sound, figures
    assert storm.done_once, figures
    assert outcome.faults.total() == faults, figures


def test_a_storm_of_jobs(tmp_path: Path) -> None:
    storm = JobStorm(Plan(streams=300, faults=20, seed=1, at_once=12), tmp_path)
    check(storm, storm.run(), 20)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_larger_storm_of_jobs(tmp_path: Path) -> None:
    storm = JobStorm(Plan(streams=2000, faults=120, seed=2, at_once=24), tmp_path)
    check(storm, storm.run(), 120)
