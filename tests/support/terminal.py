"""Runs a command in a pseudo-terminal: reads output, sends keys, waits for the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

from mlxpool.common.closing import Closing
from support.pool import PATIENCE

INTERRUPT_INTERVAL = 5.0  # seconds between two Ctrl-C
LINES, COLUMNS = 40, 160
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


class Terminal(Closing):
    """A command in a terminal; `close` kills it if it still runs."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        columns: int = COLUMNS,
        lines: int = LINES,
    ) -> None:
        self._mine, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.shown = ""  # all output without escape sequences
        self.raw = ""

        def own_terminal() -> None:  # Ctrl-C becomes SIGINT only for the command
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        # readline sets these variables in the tests' process; the terminal has its own size.
        own = {
            name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")
        }
        try:
            self.process = subprocess.Popen(
                command,
                stdin=its,
                stdout=its,
                stderr=its,
                env={**own, "TERM": "xterm", "PYTHONUNBUFFERED": "1"},
                preexec_fn=own_terminal,
            )
        except BaseException:
            os.close(self._mine)
            raise
        finally:
            os.close(its)

    def until(self, text: str, *, after: int = 0) -> int:
        """Reads until `text` is shown after position `after`; returns the position after `text`."""
        end = time.monotonic() + PATIENCE
        while (at := self.shown.find(text, after)) < 0:
            assert time.monotonic() < end, f"never shown: {text!r}; shown: {self.shown[-2000:]!r}"
            assert self._read(0.1), f"it ended without {text!r}; shown: {self.shown[-2000:]!r}"
        return at + len(text)

    def _read(self, seconds: float) -> bool:
        """Reads some output; returns False at the end."""
        if not select.select([self._mine], [], [], seconds)[0]:
            return True
        try:
            new = os.read(self._mine, 65536)
        except OSError:  # the command has closed the terminal
            return False
        self.raw += new.decode(errors="replace")
        self.shown = ESCAPES.sub("", self.raw)
        return bool(new)

    def interrupt(self, text: str, *, after: int) -> int:
        """Sends Ctrl-C repeatedly until `text` is shown; returns the position after `text`.

        Python drops a Ctrl-C that arrives between the prompt and the wait for input.
        """
        end = time.monotonic() + PATIENCE
        while True:
            self.send("\x03")
            again = time.monotonic() + INTERRUPT_INTERVAL
            while time.monotonic() < again:
                if (at := self.shown.find(text, after)) >= 0:
                    return at + len(text)
                self._read(0.1)
            assert time.monotonic() < end, f"never shown: {text!r}; shown: {self.shown[-2000:]!r}"

    def send(self, keys: str) -> None:
        os.write(self._mine, keys.encode())

    def ended(self) -> int:
        """Reads to the end of the output; returns the exit code."""
        end = time.monotonic() + PATIENCE
        while self._read(0.1):
            assert time.monotonic() < end, f"it goes on; shown: {self.shown[-2000:]!r}"
        return self.process.wait(timeout=PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._mine)
