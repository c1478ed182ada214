"""One question to the broker's admin socket and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.cli.reach import no_answer
from mlxpool.cli.target import Target
from mlxpool.common.errors import BrokerLost
from mlxpool.common.transport import question

ANSWER_TIMEOUT = 2.0  # seconds
RELOAD_TIMEOUT = 30.0  # seconds; settings and models folders are read before the answer


def ask(
    where: Path | Target,
    kind: str,
    body: Mapping[str, Any] | None = None,
    ident: bytes | None = None,
    *,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Send one admin message; returns the body of the answer.

    `where` is the run directory of a local broker, or a target. Raises BrokerLost naming the
    endpoint without an answer in time, which a broker that is starting may still give, Unauthorized
    naming a key that the broker refuses, and the error that the broker answers with.
    """
    target = Target(where) if isinstance(where, Path) else where
    endpoint, credentials = target.endpoint_of("admin"), target.credentials()
    answer = question.ask(endpoint, credentials, kind, body or {}, ident, timeout)
    if answer is None:
        raise BrokerLost(no_answer(target.run_dir, endpoint))
    return answer


def reload(target: Target) -> dict[str, Any]:
    """Have the broker read its settings again; returns what has changed. Raises as `ask` does."""
    ask(target, "stats")  # says within ANSWER_TIMEOUT that a broker is frozen
    return ask(target, "reload", timeout=RELOAD_TIMEOUT)
