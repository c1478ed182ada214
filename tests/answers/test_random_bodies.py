"""The answers to random bodies equal the recorded answers, word by word."""

from __future__ import annotations

from pathlib import Path

from answers.random_bodies import answers

RECORDED = Path(__file__).with_name("answers.txt")


def test_a_thousand_random_bodies_get_the_recorded_answers() -> None:
    """Errors are compared by text, code and field. Parsed values are compared by a digest."""
    recorded = RECORDED.read_text("utf-8").splitlines()
    actual = list(answers())
    changed = [f"{old}\n{new}" for old, new in zip(recorded, actual, strict=True) if old != new]
    assert not changed, "\n".join(changed[:10])
