"""What a request asks for that has no effect here: the log says each once."""

from __future__ import annotations

import logging
from typing import Any

from mlxpool.common.checks import shown

log = logging.getLogger("mlxpool.gateway")

MAX_LOGGED = 200  # things that the log names; a client may make up any number of them
NO_ROOM = "[an attachment of the type {kind}, which this model cannot read]"
ELSEWHERE = "this server does not run it, and the model is not told of it"
_logged: set[tuple[str, str]] = set()


def log_left_out(event: str, thing: str, why: str) -> None:
    """Log that a thing of a request has no effect, and why, unless the log has it."""
    if (event, thing) not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add((event, thing))
        log.info(event, extra={"thing": thing, "why": why})


def leave_tool_out(kind: Any) -> None:
    """Note a tool of a kind that runs elsewhere."""
    log_left_out("a tool is left out", shown(kind), ELSEWHERE)
