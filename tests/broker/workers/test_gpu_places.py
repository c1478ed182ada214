"""The GPUs of workers: the least used first, the same GPUs after a restart, each released once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxpool.broker.workers.gpu_places import GpuPlaces, choose
from mlxpool.common.gpus import GpusUnavailable

TWO = ("0", "1")
FOUR = ("0", "1", "2", "3")


def test_two_models_of_one_worker_have_a_gpu_each() -> None:
    places = GpuPlaces()
    assert places.take("a/0", TWO, 1) == ("0",)
    assert places.take("b/0", TWO, 1) == ("1",)
    assert places.take("c/0", TWO, 1) == ("0",)
    assert places.take("d/0", TWO, 1) == ("1",)


def test_a_group_leaves_the_gpu_of_another_worker_alone() -> None:
    places = GpuPlaces()
    assert places.take("small/0", FOUR, 1) == ("0",)
    assert places.take("big/0", FOUR, 2) == ("1", "2")
    assert places.take("small/1", FOUR, 1) == ("3",)
    assert places.take("big/1", FOUR, 2) == ("0", "1"), "all are taken: it shares with the fewest"
    assert places.take("small/2", FOUR, 1) == ("2",)


def test_a_worker_has_its_own_gpu_again() -> None:
    places = GpuPlaces()
    for slot in ("a/0", "a/1"):
        places.take(slot, TWO, 1)
    for slot in ("a/0", "a/1"):
        places.release(slot)
    assert places.take("a/1", TWO, 1) == ("1",), "both are free, and 1 was its own"
    assert places.take("a/0", TWO, 1) == ("0",)


def test_unless_another_worker_has_it_while_one_is_free() -> None:
    places = GpuPlaces()
    places.take("a/0", TWO, 1)
    places.release("a/0")
    assert places.take("b/0", TWO, 1) == ("0",)
    assert places.take("a/0", TWO, 1) == ("1",)


def test_the_order_of_gpu_ids_is_that_in_which_they_are_taken() -> None:
    places = GpuPlaces()
    assert places.take("a/0", ("3", "1"), 1) == ("3",)
    assert places.take("b/0", FOUR, 1) == ("0",)
    assert places.take("a/1", ("3", "1"), 1) == ("1",)
    assert places.take("g/0", ("2", "0"), 2) == ("2", "0")


def test_a_group_without_enough_gpus_is_refused_and_takes_none() -> None:
    places = GpuPlaces()
    with pytest.raises(GpusUnavailable, match=r"devices is 3, .* there are 2 .*\(0, 1\)"):
        places.take("big/0", TWO, 3)
    assert places.held() == {}
    assert places.take("big/0", FOUR, 3) == ("0", "1", "2")


def test_without_gpus_nothing_is_given() -> None:
    places = GpuPlaces()
    assert places.take("a/0", (), 1) == places.take("big/0", (), 4) == ()
    places.release("a/0")


def test_a_place_is_taken_and_released_once() -> None:
    places = GpuPlaces()
    with pytest.raises(ValueError, match="a/0 is unplaced: no 'release' there"):
        places.release("a/0")
    places.take("a/0", TWO, 1)
    with pytest.raises(ValueError, match="a/0 is held: no 'take' there"):
        places.take("a/0", TWO, 1)
    assert places.held() == {"a/0": ("0",)}
    places.release("a/0")
    with pytest.raises(ValueError, match="a/0 is left: no 'release' there"):
        places.release("a/0")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_those_with_the_fewest_workers_are_chosen(count: int) -> None:
    chosen = choose(FOUR, {"0": 2, "1": 1, "3": 1}, (), count)
    assert chosen == [("2",), ("1", "2"), ("1", "2", "3")][count - 1]


class Places(RuleBasedStateMachine):
    """A state machine that starts and ends workers of several models, with and without gpu_ids."""

    slots = st.builds(lambda model, n: f"{model}/{n}", st.sampled_from("abg"), st.integers(0, 3))
    allowed = st.sampled_from([FOUR, ("2", "1"), ("3",), ("1", "0", "3"), ()])

    def __init__(self) -> None:
        super().__init__()
        self.places = GpuPlaces()
        self.expected: dict[str, tuple[str, ...]] = {}
        self.last: dict[str, tuple[str, ...]] = {}

    def load(self) -> Counter[str]:
        return Counter(gpu for gpus in self.expected.values() for gpu in gpus)

    @rule(slot=slots, gpus=allowed, count=st.integers(1, 3))
    def start(self, slot: str, gpus: tuple[str, ...], count: int) -> None:
        before = self.load()
        if slot in self.expected:
            return
        if 0 < len(gpus) < count:
            with pytest.raises(GpusUnavailable):
                self.places.take(slot, gpus, count)
            return
        given = self.places.take(slot, gpus, count)
        assert len(given) == len(set(given)) == (count if gpus else 0)
        assert set(given) <= set(gpus)
        others = set(gpus) - set(given)
        if given and others:
            assert max(before[gpu] for gpu in given) <= min(before[gpu] for gpu in others)
        free = [gpu for gpu in gpus if not before[gpu]]
        if len(free) >= count:
            assert not any(before[gpu] for gpu in given), "one is shared while others are free"
            own = self.last.get(slot, ())
            if len(own) == count and set(own) <= set(free):
                assert set(given) == set(own), "a worker did not get its own place again"
        self.expected[slot] = self.last[slot] = given

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.expected)))
        del self.expected[slot]
        self.places.release(slot)
        with pytest.raises(ValueError, match="no 'release' there"):
            self.places.release(slot)

    @invariant()
    def those_that_run_hold_places(self) -> None:
        assert self.places.held() == self.expected


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlaces = Places.TestCase
