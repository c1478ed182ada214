"""`POST /log`: an operator reads the end of a worker's log on the status page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from mlxpool.broker.http.operator_route import OperatorRoute
from mlxpool.common.errors import BadRequest
from mlxpool.common.paths import worker_log
from mlxpool.common.regular_files import open_regular

MAX_LINES = 200
MAX_BYTES = 1 << 16
MAX_SLOT = 400  # characters


class LogRoute(OperatorRoute[str]):
    """What is asked is a slot. Its file is read on the thread of the HTTP server."""

    path: ClassVar[str] = "/log"
    max_body: ClassVar[int] = 1024

    def __init__(self, run_dir: Path, token: bytes) -> None:
        super().__init__(token)
        self._run_dir = run_dir

    def parse(self, asked: dict[str, Any], peer: str) -> str:
        slot = asked.get("slot")
        if not isinstance(slot, str) or not 0 < len(slot) <= MAX_SLOT or "\0" in slot:
            raise BadRequest('the body must be {"slot": "…"} with a slot such as demo/0')
        return slot

    def perform(self, asked: str) -> dict[str, Any]:
        """Raises BadRequest where there is no such log."""
        path = worker_log(self._run_dir, asked)
        try:
            return {"slot": asked, "text": last_lines(path)}
        except OSError as error:
            raise BadRequest(
                f"there is no log of {asked} in {path.parent} ({error.strerror}); a worker of"
                " another machine logs there"
            ) from None


def last_lines(path: Path) -> str:
    """The last MAX_LINES lines of a file, of MAX_BYTES at most. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - MAX_BYTES)
        file.seek(begin)
        data = file.read(MAX_BYTES)
    whole = data.partition(b"\n")[2] if begin else data
    return b"".join(whole.splitlines(keepends=True)[-MAX_LINES:]).decode("utf-8", "replace")
