"""The progress of a batch in one line."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.cli import batch_actions
from mlxpool.cli.batch_actions import follow, progress_text, sent_text, summary
from mlxpool.cli.style import StatusLine, bar


def row(**counts: Any) -> dict[str, Any]:
    zero = dict.fromkeys(
        ("waiting", "running", "done", "dead", "expired", "cancelled", "failed"), 0
    )
    return {
        "key": "k", "state": "running", "lines": 50_000, "trouble": "", **zero, **counts,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "[........................] 0 %"),
        (0.5, "[############............] 50 %"),
        (0.9999, "[#######################.] 99 %"),
        (1.0, "[########################] 100 %"),
        (7.0, "[########################] 100 %"),
    ],
)
def test_a_bar_is_full_at_the_end_alone(share: float, shown: str) -> None:
    assert bar(share) == shown


def test_the_rate_and_the_time_that_is_left_come_from_what_was_seen() -> None:
    text = progress_text(row(done=20_000, dead=5000), ended_before=5000, seconds=10.0)
    assert text == (
        "[############............] 50 %, 25,000 of 50,000 lines, 5,000 failed"
        " (2,000.0 a second, 12.5 s left)"
    )
    early = progress_text(row(done=20), ended_before=0, seconds=0.5)
    assert early.endswith("20 of 50,000 lines")


def test_trouble_is_told() -> None:
    text = progress_text(row(trouble="the model m is drained"), 0, 5.0)
    assert text.endswith("0 of 50,000 lines; waiting: the model m is drained")


def test_a_summary_has_the_counts_that_are_not_zero() -> None:
    assert summary(row(state="done", done=3, failed=1)) == "k: done, 3 done, 1 failed"
    assert summary(row(state="done", lines=0)) == "k: done, no lines"


def test_what_is_sent_of_a_file_or_of_a_pipe() -> None:
    assert sent_text(500_000, 1_000_000) == "sending [############............] 50 % of 1.0 MB"
    assert sent_text(500_000, None) == "sending 500 kB"


def test_a_batch_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(StatusLine, "show", lambda line, text: shown.append(text))
    times = iter([0.0, 0.0, 4.0])
    follow([row(done=10_000), row(done=20_000)], lambda: next(times))
    assert "a second" not in shown[0]
    assert shown[1].endswith("20,000 of 50,000 lines (2,500.0 a second, 12.0 s left)")
    assert batch_actions.MIN_SECONDS < 4.0
