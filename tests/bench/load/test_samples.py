"""The figures of a load test, computed from the samples of its clients."""

from __future__ import annotations

import pytest

from mlxpool.bench.load.measure import rows
from mlxpool.bench.load.samples import (
    Sample,
    Slo,
    errors,
    summarise,
    tokens_per_piece,
)
from mlxpool.bench.measurement import OURS

QUICK = Sample(0.0, 0.0, (0.1, 0.2, 0.3), prompt_tokens=10, output_tokens=3)
SLOW = Sample(1.0, 1.5, (2.0, 2.1, 2.2, 3.0), prompt_tokens=30, output_tokens=7)
FAILED = Sample(0.5, 0.5, (), prompt_tokens=99, output_tokens=0, error="queue_full")


def figures(*samples: Sample, slo: Slo | None = None) -> dict[str, float]:
    return {metric.name: value for metric, value in summarise(samples, slo or Slo()).items()}


def test_throughput_counts_from_the_first_due_to_the_last_token() -> None:
    values = figures(QUICK, SLOW)
    assert values["request throughput"] == pytest.approx(2 / 3)
    assert values["output token throughput"] == pytest.approx(10 / 3)
    assert values["total token throughput"] == pytest.approx(50 / 3)


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    values = figures(SLOW)
    assert values["TTFT mean"] == pytest.approx(1000)  # including the sender's delay of 500 ms
    assert values["E2EL p99"] == pytest.approx(2000)
    assert values["sender late, max"] == pytest.approx(500)
    assert values["TPOT median"] == pytest.approx(1000 / 6)
    assert values["ITL max"] == pytest.approx(800)
    assert values["ITL median"] == pytest.approx(100)


def test_failed_requests_count_as_failed_and_nowhere_else() -> None:
    with_failure, without = figures(QUICK, SLOW, FAILED), figures(QUICK, SLOW)
    assert with_failure.pop("failed requests") == 1 and without.pop("failed requests") == 0
    late = {name for name in without if name.startswith("sender late")}
    assert {k: v for k, v in with_failure.items() if k not in late} == {
        k: v for k, v in without.items() if k not in late
    }


def test_a_load_without_an_answer_has_no_figures() -> None:
    with pytest.raises(ValueError, match=r"no request was answered: queue_full \(2\)"):
        summarise([FAILED, FAILED], Slo())


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (Slo(ttft=1000), 2),
        (Slo(ttft=500), 1),
        (Slo(itl=800.001), 2),
        (Slo(itl=799), 1),
        (Slo(tpot=99), 0),
        (Slo(e2el=400, tpot=150), 1),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(slo: Slo, met: int) -> None:
    assert figures(QUICK, SLOW, slo=slo)["goodput"] == pytest.approx(met / 3)
    assert "goodput" not in figures(QUICK, SLOW)


def test_answers_of_one_piece_have_no_gaps() -> None:
    single = Sample(0.0, 0.0, (0.5,), 4, 1)
    values = figures(single)
    assert not [name for name in values if name.startswith(("ITL", "TPOT"))]
    assert values["E2EL mean"] == pytest.approx(500)


def test_errors_are_named_most_common_first() -> None:
    other = Sample(0.0, 0.0, (), 4, 0, error="HTTP 503: busy")
    assert errors([QUICK, other, FAILED, FAILED]) == "queue_full (2), HTTP 503: busy (1)"
    assert errors([QUICK]) == ""


def test_tokens_of_a_piece() -> None:
    assert tokens_per_piece([QUICK, FAILED]) == 1.0
    assert tokens_per_piece([SLOW]) == 7 / 4


# ---- the table -----------------------------------------------------------------------------------


def test_rows_have_a_figure_a_round_and_ratios() -> None:
    lines = {
        line.name: line
        for line in rows(12.0, {OURS: [[SLOW], [QUICK]], "b": [[QUICK], [SLOW]]}, Slo())
    }
    assert {line.group for line in lines.values()} == {"12 requests/s"}
    assert lines["TTFT median"].ratios() == pytest.approx([0.1, 10.0])
    assert lines["output token throughput"].ratios() == pytest.approx([7 / 20, 20 / 7])
    assert lines["sender late, max"].ratios() == []
    assert all(line.at == 12.0 for line in lines.values())


def test_a_metric_that_one_round_lacks_is_left_out() -> None:
    single = Sample(0.0, 0.0, (0.5,), 4, 1)
    names = [line.name for line in rows(0.0, {OURS: [[QUICK], [single]]}, Slo())]
    assert "TTFT p99" in names and "ITL p99" not in names


def test_notes_name_what_figures_leave_out() -> None:
    guessed = Sample(0.0, 0.0, (0.1, 0.2), 4, 2, exact=False)
    sides = {OURS: [[SLOW, FAILED], [SLOW, SLOW]], "b": [[guessed], [guessed]]}
    *others, last = rows(0.0, sides, Slo())
    assert not any(line.note for line in others)
    assert last.note.split("\n\n") == [
        "mlxpool: 1 of 4 requests failed and are in no other figure: queue_full (1).",
        "mlxpool: a piece of a stream has 1.75 tokens; ITL is between pieces.",
        "b reports no usage: each event of its streams counts as one token.",
    ]
    assert last.name == "failed requests" and last.sides[OURS] == (1, 0)
