"""Tests the report on the prompt in an answer: tokens with log-probabilities, and text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options
from mlxpool.common.protocol.deltas import Delta, size_of
from mlxpool.worker.compute.prompt_report import ROW_BYTES, PromptReport, Row
from mlxpool.worker.scheduling.sequence import TokenLogprob

TEXT = "caf\u00e9 \u2014 \U0001f642 end"
PROMPT = tuple(TEXT.encode())  # each token is a byte


def piece(token: int) -> bytes:
    return bytes([token])


def report(
    prompt: tuple[int, ...] = PROMPT, reported: int = 0, unseen: int = 0, **options: Any
) -> PromptReport:
    prompt_report = PromptReport.of(Options.parse(options), prompt, piece, reported, unseen)
    assert prompt_report is not None
    return prompt_report


def joined(rows: Iterable[Row]) -> tuple[str, list[dict[str, Any]]]:
    pairs = [*rows]
    return "".join(text for text, _ in pairs), [entry for _, row in pairs for entry in row]


def test_without_a_wish_there_is_no_report() -> None:
    for options in ({}, {"logprobs": True}, {"prompt_logprobs": -1}):
        assert PromptReport.of(Options.parse(options), PROMPT, piece, 0, 0) is None


def test_an_echo_is_told_before_the_prompt_is_read() -> None:
    prompt_report = report(echo=True)
    text, entries = joined(prompt_report.begin())
    assert text == TEXT and prompt_report.reported == len(PROMPT)
    assert entries[0] == {"prompt": 0, "id": ord("c"), "token": "c"}
    assert [entry["prompt"] for entry in entries] == [*range(len(PROMPT))]
    assert [*prompt_report.begin()] == []


@pytest.mark.parametrize("cut", range(len(PROMPT) + 1))
def test_a_report_goes_on_at_any_token(cut: int) -> None:
    """A resume after `cut` reported tokens continues the text and the log-probabilities.

    Both parts join to the prompt's text, even if the cut is inside a character.
    """
    logprobs = [TokenLogprob(-float(n), ((1, -0.5), (2, -1.5))) for n in range(len(PROMPT))]
    first = report(echo=True, prompt_logprobs=2)
    text, entries = joined(first.begin()) if cut else ("", [])
    more, others = joined(first.add(logprobs[1:cut]))
    second = report(reported=cut, echo=True, prompt_logprobs=2)
    begin, rest = joined(second.begin())
    end, last = joined(second.add(logprobs[max(1, cut) :]))
    assert text + more + begin + end == TEXT
    all_entries = [*entries, *others, *rest, *last]
    assert [entry["prompt"] for entry in all_entries] == [*range(len(PROMPT))]
    assert [entry["logprob"] for entry in all_entries] == [
        None,
        *(-float(n) for n in range(1, len(all_entries))),
    ]
    assert all_entries[0]["top"] == [] and all_entries[1]["top"][1]["token"] == "\x02"


def test_what_the_tokenizer_adds_is_no_text() -> None:
    text, entries = joined(report((1, 2, *PROMPT), unseen=2, echo=True).begin())
    assert text == TEXT
    assert [entry.get("added") for entry in entries[:3]] == [True, True, None]


def test_rows_fit_into_messages() -> None:
    prompt_report = report(tuple(range(256)) * 8, prompt_logprobs=20, echo=True)
    top = tuple((token, -1.0) for token in range(20))
    rows = [*prompt_report.begin(), *prompt_report.add([TokenLogprob(-2.0, top)] * (256 * 8 - 1))]
    assert len(rows) > 50
    for text, entries in rows:
        assert size_of(Delta(b"", 1, 0, text, b"", entries)) <= ROW_BYTES + 4 * len(text)


def test_reports_that_are_too_long_are_refused() -> None:
    with pytest.raises(BadRequest, match="12484 prompt tokens with 20 alternatives each has 26216"):
        report((1,) * 12484, prompt_logprobs=20)
    report((1,) * 12483, prompt_logprobs=20)
    with pytest.raises(BadRequest, match=r"resume.reported is 3, the prompt has 2 tokens"):
        report((1, 2), reported=3, echo=True)
