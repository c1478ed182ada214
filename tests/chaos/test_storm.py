"""A small storm of faults; `make chaos` runs a larger one, large_storm.py the largest."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.storm import Plan, Storm


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm(tmp_path: Path, seed: int) -> None:
    outcome = Storm(Plan(streams=250, faults=25, seed=seed), tmp_path).run()
    assert outcome.findings.sound, outcome.figures
    assert not outcome.hit_twice_and_not_done, outcome.figures
    assert outcome.findings.streams >= 250
    assert outcome.faults.total() == 25, outcome.figures
    large = {code for code in outcome.errors if "large prompt" in code}
    assert large <= {"large prompt: context_exceeded"}, outcome.errors


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_larger_storm(tmp_path: Path) -> None:
    outcome = Storm(Plan(streams=2000, faults=200, seed=3, at_once=48), tmp_path).run()
    assert outcome.findings.sound, outcome.figures
    assert not outcome.hit_twice_and_not_done, outcome.figures
