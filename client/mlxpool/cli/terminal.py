"""A terminal for a picture that changes: keys one by one, a page that is drawn over itself."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
from collections.abc import Iterator

ENTER = "\x1b[?1049h\x1b[?25l"  # the other page, no cursor
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_PAGE = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """Standard output, a terminal or not, and the keys of standard input, if it is one."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.keys = self.live and sys.stdin.isatty()

    @property
    def room(self) -> tuple[int, int]:
        """Columns and lines; without a terminal there is no end of them."""
        if not self.live:
            return 10_000, 10_000
        there = shutil.get_terminal_size()
        return there.columns, there.lines

    def show(self, text: str) -> None:
        """Draw a page over the last one, or print it below."""
        if not self.live:
            print(text, end="\n\n", flush=True)
            return
        lines = text.splitlines()[: self.room[1]]
        page = "\n".join(line + REST_OF_LINE for line in lines)
        sys.stdout.write(HOME + page + REST_OF_PAGE)
        sys.stdout.flush()

    def pressed(self) -> str:
        """The keys pressed since the last call."""
        if not self.keys or not select.select([sys.stdin], [], [], 0)[0]:
            return ""
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace")


@contextlib.contextmanager
def screen() -> Iterator[Screen]:
    """The terminal is as it was afterwards, whatever happened."""
    shown = Screen()
    before = _one_by_one() if shown.keys else None
    if shown.live:
        sys.stdout.write(ENTER)
    try:
        yield shown
    finally:
        if shown.live:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
        if before is not None:
            _as_before(before)


def _one_by_one() -> object:
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    return before


def _as_before(before: object) -> None:
    import termios

    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)  # type: ignore[arg-type]
