"""How a run or a stream ends: the body of `done`, or that of an `error`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.checks import mapping


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens of the whole completion, ids of a resume included."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended in its worker, as it travels in the last row of `deltas`.

    `usage` and `timings_ms` are passed on as the worker made them.
    """

    reason: str
    text: str = ""  # what was held back; "" behind a stop string
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings_ms: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"text": self.text, "reason": self.reason, "usage": self.usage}
        return {**body, "timings_ms": self.timings_ms} if self.timings_ms else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> RunEnd:
        """Read leniently: a missing reason is `stop`, what is no map is an empty one."""
        return cls(
            body.get("reason", "stop"),
            body.get("text", ""),
            mapping(body.get("usage")),
            mapping(body.get("timings_ms")),
        )


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """The body of an `error`, passed on as it was made; see `errors.PoolError.body`."""

    fields: Mapping[str, Any]

    @property
    def code(self) -> str:
        return str(self.fields.get("code"))


def parse_end(end: Mapping[str, Any]) -> RunEnd | ErrorBody:
    """The end in a row of `deltas`: an error if it has a `code`."""
    return ErrorBody(end) if "code" in end else RunEnd.parse(end)
