"""The figures of benchmarks: ratios, the order of the compared programs, tables, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement, in_turn, merged, percentile

DECODE = Measurement(
    "decode", "8 streams", "tokens/s", {OURS: (10.0, 20.0), "a": (5.0, 40.0), "b": (8.0, 1.0)}, at=8
)


def test_a_ratio_is_that_of_a_round_beside_its_best_peer() -> None:
    assert DECODE.ratios() == [10 / 8, 20 / 40]


def test_a_ratio_above_one_is_better_for_seconds_too() -> None:
    line = Measurement("g", "n", "s", {OURS: (2.0,), "a": (3.0,), "b": (1.0,)}, less_is_better=True)
    assert line.ratios() == [0.5]


@pytest.mark.parametrize(
    "line",
    [
        Measurement("g", "n", "s", {OURS: (2.0,)}),
        Measurement("g", "n", "s", {"a": (2.0,), "b": (1.0,)}),
        Measurement("g", "n", "s", {OURS: (2.0,), "a": (1.0,)}, compared=False),
    ],
)
def test_no_ratio_without_another_contestant(line: Measurement) -> None:
    assert line.ratios() == []


@pytest.mark.parametrize("less", [True, False])
def test_no_ratio_where_it_would_divide_by_0(less: bool) -> None:
    sides = {OURS: (0.0, 1.0), "a": (1.0, 0.0)}
    assert Measurement("g", "n", "ms", sides, less_is_better=less).ratios() == []


def test_the_order_of_contestants_rotates() -> None:
    order: list[str] = []

    def contestant(name: str, value: float) -> float:
        order.append(name)
        return value

    values = in_turn({"a": lambda: contestant("a", 1.0), "b": lambda: contestant("b", 2.0)}, 3)
    assert values == {"a": (1.0, 1.0, 1.0), "b": (2.0, 2.0, 2.0)}
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    figures = Figures("engine", "about", "machine", "versions", "mlxpool bench", (DECODE,))
    report.write(tmp_path / "engine.json", figures)
    read = report.read(tmp_path / "engine.json")
    assert report.markdown(read) == report.markdown(figures)
    assert read.lines[0].ratios() == DECODE.ratios()


def test_a_table_for_each_group_with_units_where_they_differ() -> None:
    lines = (
        DECODE,
        Measurement("prefix", "found", "%", {OURS: (100.0,)}, note="Of 20 tokens."),
        Measurement("prefix", "took", "s", {OURS: (1.25,)}, digits=2),
    )
    text = report.markdown(Figures("engine", "About.", "m", "v", "mlxpool bench engine", lines))
    assert text == (
        "```sh\nmlxpool bench engine\n```\n\n"
        "About.\nv; m.\nMedian (minimum - maximum); a ratio is that of one round, above 1 is"
        " better.\n\n"
        "| decode, tokens/s | mlxpool | a | b | ratio |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 8 streams | 15.0 (10.0 - 20.0) | 22.5 (5.0 - 40.0) | 4.5 (1.0 - 8.0)"
        " | **0.88 (0.50 - 1.25)** |\n\n"
        "| prefix | mlxpool |\n| --- | --- |\n| found, % | 100.0 |\n| took, s | 1.25 |\n\n"
        "Of 20 tokens.\n"
    )


def test_lines_of_several_runs_are_merged_by_table_and_row() -> None:
    one = Measurement("g", "n", "s", {"one": (1.0,)}, note="Of one.")
    other = Measurement("g", "n", "s", {"other": (2.0,)}, note="Of the other.")
    alone = Measurement("g", "m", "s", {"other": (3.0,)})
    both, last = merged({"one": [one], "other": [other, alone]})
    assert both.sides == {"one": (1.0,), "other": (2.0,)}
    assert both.note == "Of one.\n\nOf the other." and last == alone


@pytest.mark.parametrize(
    ("values", "percent", "wanted"),
    [
        ([3.0], 99, 3.0),
        ([1.0, 2.0], 50, 1.5),
        ([4.0, 1.0, 3.0, 2.0, 5.0], 50, 3.0),
        (list(map(float, range(101))), 99, 99.0),
        ([0.0, 10.0], 99, 9.9),
        ([7.0, 9.0], 0, 7.0),
        ([7.0, 9.0], 100, 9.0),
    ],
)
def test_percentiles_are_interpolated(values: list[float], percent: float, wanted: float) -> None:
    assert percentile(values, percent) == pytest.approx(wanted)
