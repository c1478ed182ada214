"""The predicted time of a pass: fits to synthetic passes with known costs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import (
    MIN_OBSERVATIONS,
    OBSERVATIONS,
    Load,
    StepCost,
    StepTarget,
)


@dataclass(frozen=True)
class Machine:
    """A simulated machine: a pass takes `base` seconds, and more seconds for its work.

    `line`: seconds for each input. `key`: for each key. `pair`: for each pair of an input and a
    key. `drawn`: for each drawn token.
    """

    base: float
    line: float
    key: float
    pair: float
    drawn: float

    def seconds(self, load: Load) -> float:
        return (
            self.base
            + self.line * load.lines
            + self.key * load.keys
            + self.pair * load.pairs
            + self.drawn * load.drawn
        )


GPU = Machine(2e-3, 2e-5, 2e-9, 3e-9, 1e-5)
CPU = Machine(5e-3, 1e-3, 1e-7, 2e-8, 2e-4)


def decode_load(draw: random.Random) -> Load:
    rows = draw.randrange(1, 129)
    return Load(rows, sum(draw.randrange(50, 4000) for _ in range(rows)), 0, rows)


def mixed_load(draw: random.Random) -> Load:
    rows = decode_load(draw)
    lines, start = draw.randrange(16, 900), draw.randrange(0, 3000)
    return Load(
        rows.lines + lines,
        rows.keys,
        lines * (start + lines),
        rows.drawn + draw.randrange(0, 3),
    )


def fitted(machine: Machine, noise: float, *, seed: int = 1, passes: int = 400) -> StepCost:
    cost, draw = StepCost(), random.Random(seed)
    for number in range(passes):
        load = mixed_load(draw) if number % 2 else decode_load(draw)
        cost.observe(load, machine.seconds(load) * draw.lognormvariate(0, noise))
    return cost


@pytest.mark.parametrize("machine", [GPU, CPU])
@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.01), (0.05, 0.06), (0.2, 0.2)])
def test_the_time_of_a_pass_is_learnt(machine: Machine, noise: float, within: float) -> None:
    cost, draw = fitted(machine, noise), random.Random(99)
    for load in [*(decode_load(draw) for _ in range(50)), *(mixed_load(draw) for _ in range(50))]:
        assert cost.seconds(load) == pytest.approx(machine.seconds(load), rel=within)


def test_each_coefficient_is_recovered() -> None:
    machine = Machine(3e-3, 4e-5, 5e-8, 6e-9, 7e-5)
    cost = fitted(machine, 0.02)
    zero = cost.seconds(Load())
    assert zero == pytest.approx(machine.base, rel=0.2)
    for load, part in (
        (Load(lines=1000), machine.line),
        (Load(keys=1000), machine.key),
        (Load(pairs=1000), machine.pair),
        (Load(drawn=1000), machine.drawn),
    ):
        assert cost.seconds(load) - zero == pytest.approx(1000 * part, rel=0.2)


def test_a_step_of_one_row_is_predicted_after_a_few_chunks() -> None:
    """The fit weighs relative errors, so that short steps count as much as long chunks."""
    cost = StepCost()
    for number in range(64):
        load = Load(512, 0, 512 * 512 * (1 + number % 4), 0) if number % 4 else Load(1, 900, 0, 1)
        cost.observe(load, CPU.seconds(load))
    assert cost.seconds(Load(1, 900, 0, 1)) == pytest.approx(
        CPU.seconds(Load(1, 900, 0, 1)), rel=0.02
    )


def test_nothing_is_predicted_before_the_first_passes() -> None:
    cost = StepCost()
    assert cost.seconds(Load(1000, 1000, 1000, 1000)) == 0
    for _ in range(MIN_OBSERVATIONS):
        cost.observe(Load(64, 0, 4096, 1), 0.02)
    assert cost.seconds(Load(64, 0, 4096, 1)) == pytest.approx(0.02, rel=0.01)


def test_what_was_observed_meanwhile_counts_in_the_next_prediction() -> None:
    """All passes since the last prediction count in the next prediction, however many they are."""
    cost = StepCost()
    for count, seconds in ((3, 0.02), (2 * OBSERVATIONS, 0.04), (2 * OBSERVATIONS, 0.01)):
        for _ in range(count):
            cost.observe(Load(8, 800, 0, 8), seconds)
        assert cost.seconds(Load(8, 800, 0, 8)) == pytest.approx(seconds, rel=0.01)


def test_a_machine_that_changes_is_learnt_again() -> None:
    cost, draw = fitted(GPU, 0.0), random.Random(5)
    for number in range(2 * OBSERVATIONS):
        load = mixed_load(draw) if number % 2 else decode_load(draw)
        cost.observe(load, CPU.seconds(load))
    load = mixed_load(draw)
    assert cost.seconds(load) == pytest.approx(CPU.seconds(load), rel=0.02)


def test_many_decode_steps_do_not_push_out_what_is_known_of_prompts() -> None:
    cost, draw = fitted(CPU, 0.0), random.Random(6)
    for _ in range(5 * OBSERVATIONS):
        load = decode_load(draw)
        cost.observe(load, CPU.seconds(load))
    load = mixed_load(draw)
    assert cost.seconds(load) == pytest.approx(CPU.seconds(load), rel=0.02)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_loads_that_are_all_alike_give_a_finite_prediction(kind: str) -> None:
    """In all passes the numbers of inputs, keys and drawn tokens are proportional to each other."""
    cost = StepCost()
    for number in range(100):
        rows = 1 + number % 8
        load = Load(rows, 100 * rows, 0, rows)
        if kind == "mixed":
            load = Load(rows, 0, 100 * rows, rows)
        cost.observe(load, 0.001 * rows)
    assert cost.seconds(Load(4, 400, 0, 4) if kind == "decode" else Load(4, 0, 400, 4)) == (
        pytest.approx(0.004, rel=0.02)
    )
    beyond = cost.seconds(Load(1000, 10**6, 10**6, 1000))
    assert 0 <= beyond < 1000


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_few_strange_passes_change_little(factor: float) -> None:
    """Few passes with odd times, such as waits for another process, change predictions little."""
    cost, draw = StepCost(), random.Random(8)
    for number in range(2 * OBSERVATIONS):
        load = mixed_load(draw) if number % 2 else decode_load(draw)
        strange = number % 64 == 33
        cost.observe(load, CPU.seconds(load) * (factor if strange else 1))
    for _ in range(20):
        load = mixed_load(draw)
        assert CPU.seconds(load) / 2 < cost.seconds(load) < CPU.seconds(load) * 2


LOADS = st.builds(
    Load, st.integers(0, 2000), st.integers(0, 10**7), st.integers(0, 10**9), st.integers(0, 500)
)
SECONDS = st.one_of(st.just(0.0), st.floats(1e-7, 100.0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(LOADS, SECONDS), max_size=60), LOADS, LOADS)
def test_a_prediction_is_never_negative_and_grows_with_the_load(
    passes: list[tuple[Load, float]], load: Load, more: Load
) -> None:
    cost = StepCost()
    for pass_load, seconds in passes:
        cost.observe(pass_load, seconds)
    prediction = cost.seconds(load)
    larger = Load(
        load.lines + more.lines,
        load.keys + more.keys,
        load.pairs + more.pairs,
        load.drawn + more.drawn,
    )
    assert math.isfinite(prediction) and 0 <= prediction <= cost.seconds(larger)


def test_the_load_of_spans() -> None:
    def seq(size: int) -> Sequence:
        return Sequence(b"", 1, tuple(range(size)), Options(), 0, 9)

    spans = [
        Span(seq(300), 299, 1, draws=1),
        Span(seq(500), 100, 50, draws=0),
        Span(seq(40), 0, 40, draws=1),
        Span(seq(9), 3, 1, draws=0),  # a chunk of one token
    ]
    load = Load.of(spans)
    assert load == Load(92, 300, 50 * 150 + 40 * 40 + 4, 2)
    step = Load()
    for span in spans:
        step = step.with_span(span)
    assert step == load and Load.of([]) == Load()


def test_the_target_of_a_pass_follows_the_decode_step_within_bounds() -> None:
    gpu, cpu = StepTarget.of_device(on_gpu=True), StepTarget.of_device(on_gpu=False)
    assert [gpu.seconds(step) for step in (0.0, 0.001, 0.004, 0.02)] == [0.008, 0.008, 0.024, 0.04]
    assert [cpu.seconds(step) for step in (0.0, 0.01, 1.0)] == [0.2, 0.2, 0.2]
