"""One line on standard error that says how far something is, while a command waits for it."""

from __future__ import annotations

import sys

from mlxpool.cli.style import takes_controls, width_of
from mlxpool.common.escapes import escape_line

BAR = 24  # characters of a progress bar


def bar(share: float) -> str:
    """A progress bar, and the share in percent, rounded down."""
    share = min(1.0, max(0.0, share))
    filled = int(share * BAR)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {int(100 * share)} %"


def in_one_line(text: str, width: int) -> str:
    """The text, or as much as a line of `width` characters has room for; reasons go first."""
    if len(text) >= width:
        text = text.partition(" (")[0]
    return text if len(text) < width else f"{text[: width - 2]}…"


class StatusLine:
    """One line of standard error that is written over, if its terminal can; else nothing."""

    def __init__(self) -> None:
        self.live = takes_controls(sys.stderr)
        self._shown = False

    def show(self, text: str) -> None:
        if self.live:
            self._shown = True  # before the write, so that `clear` works after a Ctrl-C in it
            sys.stderr.write(f"\r\x1b[K{in_one_line(escape_line(text), width_of(sys.stderr))}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
