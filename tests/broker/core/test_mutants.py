"""The faults that `mutants.py` sows: they can be sown, and the nearest tests see them."""

from __future__ import annotations

import pytest

from broker.core.mutants import MUTANTS, ROOT, Mutant, patched, pytest_of, sown

NEAREST = {
    "a terminal is sent twice": "core/test_life.py",
    "a resume is made of what was sent": "core/test_losses.py",
    "a lower attempt takes over": "core/test_same_id.py",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_has_its_place(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text("utf-8")
    changed = patched(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_tests_see_it(name: str) -> None:
    (mutant,) = (each for each in MUTANTS if each.name == name)
    with sown(mutant) as environment:
        assert pytest_of([f"tests/broker/{NEAREST[name]}"], environment)


def test_without_a_fault_they_see_nothing() -> None:
    sound = Mutant("sound", MUTANTS[0].file, MUTANTS[0].old, MUTANTS[0].old)
    with sown(sound) as environment:
        assert not pytest_of(["tests/broker/core/test_life.py"], environment)
