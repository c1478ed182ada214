"""A terminal without control sequences (TERM=dumb) gets plain text."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from mlxpool.cli.commands import chat
from mlxpool.cli.style import StatusLine
from mlxpool.cli.terminal import ALL_LINES, screen


def on_terminal(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    """Makes the output streams terminals of the type `term`, with 40 columns."""
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", term)


@pytest.mark.parametrize(("term", "controls"), [("dumb", False), ("xterm", True)])
def test_pages_and_the_line_of_progress(
    term: str,
    controls: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_terminal(monkeypatch, term)
    with screen() as shown:
        shown.show("a page")
        columns, lines = shown.size
    line = StatusLine()
    line.show("loading")
    line.clear()
    out, err = capsys.readouterr()
    assert ("\x1b" in out, "\x1b" in err) == (controls, controls)
    assert columns == 40
    if not controls:
        assert (out, err, lines) == ("a page\n\n", "", ALL_LINES)


@pytest.mark.parametrize(
    ("term", "bound"), [("dumb", []), ("xterm", ["set enable-bracketed-paste on"])]
)
def test_chat_edits_lines_only_where_it_may_write_control_sequences(
    term: str, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings: list[str] = []
    on_terminal(monkeypatch, term)
    monkeypatch.setitem(sys.modules, "readline", SimpleNamespace(parse_and_bind=bindings.append))
    chat.edit_lines()
    assert bindings == bound
