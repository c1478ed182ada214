"""The events of a process as JSON lines, for checkers; off unless MLXPOOL_HISTORY names a folder.

Every line has `t` (monotonic seconds, comparable between the processes of a host), `who`, `pid`,
`what` (the event) and the fields of the event. Ids are hexadecimal. Texts of prompts and
completions are never written.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "MLXPOOL_HISTORY"


class History:
    """An append-only file of events. One system call writes a line, so a kill cuts no line."""

    def __init__(self, who: str, folder: str | None = None) -> None:
        self._who = who
        self._file: int | None = None
        folder = os.environ.get(VARIABLE) if folder is None else folder
        if folder:
            path = Path(folder) / f"{who.replace('/', '-')}-{os.getpid()}.jsonl"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)

    @property
    def on(self) -> bool:
        """True if lines are written. Check it before computing costly fields."""
        return self._file is not None

    def write(self, what: str, /, **facts: Any) -> None:
        """Writes one line if writing is on. Errors of the file system are ignored."""
        if self._file is None:
            return
        line = {"t": time.monotonic(), "who": self._who, "pid": os.getpid(), "what": what, **facts}
        try:
            os.write(self._file, json.dumps(line, default=_hex).encode() + b"\n")
        except OSError:
            pass

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _hex(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
