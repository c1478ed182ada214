"""The lines of `mlxpool stats`: groups, rates, and pages of --watch."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.cli.commands.stats import Pages, lines
from mlxpool.cli.style import plain


def answer(uptime: float = 100.0, boot: int = 1, generated: int = 5000, **more: Any) -> Any:
    return {
        "broker": {"pid": 9, "boot": boot, "state": "ready", "uptime_s": uptime, "run_dir": "/a"},
        "requests": {"accepted": 50, "done": 20, "failed": 15, "cancelled": 5, "live": 10},
        "tokens": {"generated": generated, "prompt": 30},
        "seconds": {"queue": 4.0, "total": 80.0},
        "failures": {},
        "rejected": {},
        "conserved": True,
        **more,
    }


def told(*answers: Any) -> dict[str, list[str]]:
    """Returns the words of each line of `mlxpool stats`, by the label at the line's start."""
    rows = lines(answers, 200, plain)
    return {line[:17].strip(): line[17:].split() for line in rows if line.startswith("  ")}


def test_rates_are_since_the_start() -> None:
    shown = told(answer())
    assert shown["accepted"] == ["50", "0.50"]
    assert shown["live"] == ["10"]
    assert shown["generated"] == ["5,000", "50.0"]


def test_rates_of_watch_are_since_the_oldest_snapshot() -> None:
    shown = told(answer(), answer(102.0, generated=5300), answer(103.0, generated=9000))
    assert shown["generated"] == ["9,000", "1,333"]
    assert shown["accepted"] == ["50", "0.00"]


def test_another_broker_counts_from_zero() -> None:
    assert told(answer(), answer(2.0, boot=2, generated=10))["generated"] == ["10", "5.00"]


def test_means_are_of_the_requests_that_have_ended() -> None:
    shown = told(answer())
    assert shown["in the queue"] == ["100", "ms"] and shown["until the end"] == ["2000", "ms"]
    nothing = {"accepted": 1, "done": 0, "failed": 0, "cancelled": 0, "live": 1}
    assert "in the queue" not in told(answer(requests=nothing))


def test_codes_have_a_group_if_there_are_any() -> None:
    text = "\n".join(lines([answer(failures={"internal": 1, "worker_lost": 12})], 200, plain))
    assert "failed requests, by code\n  worker_lost" in text
    assert text.index("worker_lost") < text.index("internal ")
    assert "refused requests" not in text


def test_nothing_is_left_out() -> None:
    shown = told(answer(new_counter=7, sizes={"timers": 3}, nested={"a": {"b": ["x"]}}))
    assert shown["new_counter"] == ["7"] and shown["sizes.timers"] == ["3"]
    assert shown["nested.a"] == ["x"] and shown["conserved"] == ["yes"]


def test_a_lost_stream_is_pointed_out() -> None:
    text = "\n".join(lines([answer(conserved=False)], 200, plain))
    assert "a stream was lost or counted twice" in text


# ---- pages of --watch ----------------------------------------------------------------------------


def test_what_fits_is_one_page() -> None:
    pages = Pages()
    pages.number = 3
    assert pages.text(["a", "b"], 2) == "a\nb" and pages.number == 0


@pytest.mark.parametrize("height", [2, 5, 10, 24])
def test_pages_have_every_line_once(height: int) -> None:
    rows = [f"line {number}" for number in range(41)]
    pages, seen = Pages(), []
    for _ in rows:
        shown = pages.text(rows, height).split("\n")
        assert len(shown) == height and shown[-1].startswith(f"page {pages.number + 1} of ")
        seen += [line for line in shown[:-1] if line]
        before = pages.number
        assert pages.press(" ")
        pages.text(rows, height)
        if pages.number == before:
            break
    assert seen == rows


def test_keys() -> None:
    pages = Pages()
    rows = [str(number) for number in range(100)]
    assert pages.press("n j") and pages.number == 3
    assert pages.press("bp") and pages.number == 1
    assert pages.press("bbbb") and pages.text(rows, 10) and pages.number == 0
    assert pages.press(" " * 99) and "page 12 of 12" in pages.text(rows, 10)
    assert not pages.press("q")


@pytest.mark.parametrize("width", [38, 40, 43, 80])
def test_lines_fit_a_narrow_terminal(width: int) -> None:
    wide = answer(
        generated=1_234_567_890,
        conserved=False,
        failures={"deadline_exceeded": 123_456_789},
        auth_failures=5,
        endpoints={"metrics": "http://127.0.0.1:19464", "longer_than_others": "yes"},
    )
    rows = lines([wide], width, plain)
    assert max(map(len, rows)) <= width
    text = " ".join(" ".join(rows).split())
    assert "generated 1,234,567,890 12,345,679" in text
    assert "endpoints.metrics http://127.0.0.1:19464" in text
    assert "conserved is false" in text


def test_a_value_that_has_no_room_beside_its_key_is_below_it() -> None:
    rows = lines([answer(endpoints={"metrics": "http://127.0.0.1:19464"})], 30, plain)
    place = rows.index("  endpoints.metrics")
    assert rows[place + 1] == "    http://127.0.0.1:19464"


def test_refused_jobs_have_a_group_if_there_are_any() -> None:
    jobs = {"waiting": 1, "store": "ok", "refused": {"over_quota": 3, "store_full": 12}}
    shown = lines([answer(jobs=jobs)], 40, plain)
    place = shown.index("refused jobs, batches, files")
    assert [line.split() for line in shown[place + 1 : place + 3]] == [
        ["store_full", "12"],
        ["over_quota", "3"],
    ]
    none = lines([answer(jobs={**jobs, "refused": {}})], 40, plain)
    assert "refused jobs, batches, files" not in none and "jobs.refused" not in "\n".join(none)
