"""Each mutant of `mutants.py` can be applied, and the tests closest to it detect it."""

from __future__ import annotations

import pytest

from broker.core.mutants import MUTANTS, ROOT, Mutant, patched, pytest_of, sown

NEAREST = {
    "a terminal is sent twice": "core/test_life.py",
    "a resume is made of what was sent": "core/test_losses.py",
    "a lower attempt takes over": "core/test_same_id.py",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_each_mutant_replaces_exists_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text("utf-8")
    changed = patched(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")


def test_names_of_mutants_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_tests_fail_with_the_mutant(name: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    with sown(mutant) as environment:
        assert pytest_of([f"tests/broker/{NEAREST[name]}"], environment)


def test_the_nearest_tests_pass_without_a_mutant() -> None:
    sound = Mutant("sound", MUTANTS[0].file, MUTANTS[0].old, MUTANTS[0].old)
    with sown(sound) as environment:
        assert not pytest_of(["tests/broker/core/test_life.py"], environment)
