"""Draws a terminal page in place, and reads single keys without the enter key."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
from collections.abc import Iterator

from mlxpool.cli.style import takes_controls, width_of

ENTER_SCREEN = "\x1b[?1049h\x1b[?25l"  # the alternate screen, without a cursor
LEAVE_SCREEN = "\x1b[?25h\x1b[?1049l"
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
ALL_LINES = 10_000  # number of lines of an output that is no terminal


class Screen:
    """Standard output as a screen, and the keys of the terminal. `live` is True on a terminal.

    A terminal without control sequences (TERM=dumb) is not live: pages are printed one after
    another.
    """

    def __init__(self) -> None:
        self.live = takes_controls(sys.stdout)
        self.keys = self.live and sys.stdin.isatty()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the screen; large enough for any page if it is not live."""
        if not self.live:
            return width_of(sys.stdout), ALL_LINES
        now = shutil.get_terminal_size()
        return now.columns, now.lines

    def show(self, text: str) -> None:
        """Draws a page over the last page; if the screen is not live, prints it below."""
        if not self.live:
            print(text, end="\n\n", flush=True)
            return
        lines = text.splitlines()[: self.size[1]]
        page = "\n".join(line + CLEAR_LINE for line in lines)
        sys.stdout.write(HOME + page + CLEAR_BELOW)
        sys.stdout.flush()

    def pressed_keys(self) -> str:
        """Returns the keys that were pressed since the last call."""
        if not self.keys or not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")


@contextlib.contextmanager
def screen() -> Iterator[Screen]:
    """Yields a screen; restores the terminal at the end of the `with` block."""
    shown = Screen()
    before = _read_single_keys() if shown.keys else None
    if shown.live:
        sys.stdout.write(ENTER_SCREEN)
    try:
        yield shown
    finally:
        if shown.live:
            sys.stdout.write(LEAVE_SCREEN)
            sys.stdout.flush()
        if before is not None:
            _restore(before)


def _read_single_keys() -> object:
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    return before


def _restore(before: object) -> None:
    import termios

    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)  # type: ignore[arg-type]
