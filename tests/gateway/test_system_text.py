"""System messages whose lines change: dates and ids move to the end, header lines are removed.

The prefix cache then finds the unchanged beginning.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.gateway.formats import NO_CHAT, template_messages
from mlxpool.gateway.formats.system_text import stable_first

RULES = "You are an agent. Be kind and short.\n" * 10


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2.1.117.48f; cc_entrypoint=cli; cch={};",
        "X-Request-Id: {}",
    ],
)
def test_a_header_is_no_instruction(line: str) -> None:
    assert stable_first(line.format("71fea") + "\n" + RULES) == RULES
    assert stable_first(line.format("71fea")) == ""


@pytest.mark.parametrize(
    "line",
    [
        "Today's date: 2026-11-29", "Today is 2026-11-29.", "Current time: 2026-11-29T01:22:01Z",
        "Current date: Sunday, November 29, 2026", "Date: 29.11.2026", "Time: 10:22:01 UTC",
        "Session ID: 71fea0b2-1111-2222-3333-444455556666", "session=9bc01", "Now: 1764379321",
    ],
)  # fmt: skip
def test_a_date_or_an_id_goes_behind_the_rest(line: str) -> None:
    text = stable_first(f"{line}\n\n{RULES}")
    assert text.startswith(RULES) and text.endswith(f"\n{line}")
    assert stable_first(f"{line}\nBe kind.") == f"{line}\nBe kind.", "too short to be worth it"


def test_a_text_that_begins_as_a_header_stays() -> None:
    for text in (
        "X-rays: explain them to children.",
        "x-men: who are they? 5",
        "x-a: b c;\n" + RULES,
    ):
        assert stable_first(text) == text
    header = "x-anthropic-billing-header: cc_version=2.1; cch=71fea;"
    for between in ("", " ", "\n\n"):
        assert stable_first(f"{header}{between}{RULES}") == RULES


@pytest.mark.parametrize(
    "line", ["2026-11-29: our notes of the day", "You are facade1.", "# Rules", "Notes: 12 rules"]
)
def test_other_lines_stay_where_they_are(line: str) -> None:
    assert stable_first(f"{line}\n{RULES}") == f"{line}\n{RULES}"


def test_only_the_first_message_of_the_system_is_read() -> None:
    dated = f"Date: 2026-11-29\n{RULES}"
    user = {"role": "user", "content": dated}
    assert template_messages(NO_CHAT, [user]) == [user]
    parts: Any = [{"type": "text", "text": "x-a: b"}, {"type": "text", "text": RULES}]
    for content in (dated, parts):
        said = [{"role": "system", "content": content}, user]
        first, second = template_messages(NO_CHAT, said)
        assert str(first["content"]).startswith(RULES) and second == user
    header = {"role": "system", "content": "x-anthropic-billing-header: cch=1;"}
    assert template_messages(NO_CHAT, [header, user]) == [user]
