"""What a request may ask of sampling and length: names, types, bounds and defaults.

The defaults are Ollama's, so that the same request means the same in both.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxpool.common.errors import BadRequest

MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Options:
    """Checked options of one request; build them with `Options.parse`."""

    max_tokens: int = -1  # tokens of completion; <= 0: up to the context
    temperature: float = 0.8  # 0 is greedy
    top_p: float = 0.9  # 1 (or 0) is off
    top_k: int = 40  # 0 is off
    min_p: float = 0.0  # 0 is off
    repeat_penalty: float = 1.0  # 1 is off
    repeat_last_n: int = 64  # tokens the penalties look back on; -1: the context, 0: none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int = -1  # < 0: the broker draws one
    stop: tuple[str, ...] = ()  # text that ends the completion and is not sent
    logprobs: bool = False
    top_logprobs: int = 0  # alternatives reported for each token
    ignore_eos: bool = False

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Options from a message's map.

        Raises BadRequest naming the option, its value and its bound.
        """
        values: dict[str, Any] = {}
        for name, value in raw.items():
            target = ALIASES.get(name, name)
            check = CHECKS.get(target)
            if check is None:
                raise BadRequest(f"unknown option {name!r}{_nearest(name)}")
            if value is not None:
                values[target] = check(name, value)
        return cls(**values)

    def to_wire(self) -> dict[str, Any]:
        """The map that `parse` reads back to an equal object."""
        wire = asdict(self)
        wire["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        wire["stop"] = list(self.stop)
        return wire


def _nearest(name: object) -> str:
    if name in BESIDE:
        return "; it is a key of the request, beside its options"
    near = difflib.get_close_matches(str(name), [*CHECKS, *ALIASES, *BESIDE], n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known options: {', '.join(CHECKS)}; beside options: {', '.join(BESIDE)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"option {name!r} must be an integer, got {_shown(value)}")
        if not low <= value <= high:
            raise BadRequest(f"option {name!r} is {value}, must be from {low} to {high}")
        return value

    return check


def _number(low: float, high: float) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadRequest(f"option {name!r} must be a number, got {_shown(value)}")
        if not math.isfinite(value) or not low <= value <= high:
            raise BadRequest(f"option {name!r} is {value}, must be from {low:g} to {high:g}")
        return float(value)

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"option {name!r} must be true or false, got {_shown(value)}")
    return value


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) for s in stops):
        raise BadRequest(f"option {name!r} must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"option {name!r} has {len(stops)} strings, at most {MAX_STOPS}")
    for stop in stops:
        size = len(stop.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise BadRequest(
                f"option {name!r} has a string of {size} bytes, must be 1 to {MAX_STOP_BYTES}"
            )
    return tuple(stops)


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"option {name!r} must be a map of token id to number")
    if len(value) > MAX_BIASES:
        raise BadRequest(f"option {name!r} has {len(value)} entries, at most {MAX_BIASES}")
    amount = _number(-100, 100)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        digits = str(token)
        if not re.fullmatch("[0-9]{1,10}", digits) or int(digits) > MAX_COUNT:
            raise BadRequest(f"option {name!r} has the key {_shown(token)}, which is no token id")
        biases[int(digits)] = amount(f"{name}[{digits}]", bias)
    return biases


ALIASES = {"num_predict": "max_tokens"}
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
BESIDE = (  # keys of the request itself; Python's clients take them among the options
    "deadline_ms",
    "queue_ms",
    "first_token_ms",
    "priority",
    "window",
    "batch",
    "durable",
    "session",
    "tools",
    "think",
)

CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(-(2**31), MAX_COUNT),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _integer(0, MAX_COUNT),
    "min_p": _number(0, 1),
    "repeat_penalty": _number(0.01, 100),
    "repeat_last_n": _integer(-1, MAX_COUNT),
    "presence_penalty": _number(-100, 100),
    "frequency_penalty": _number(-100, 100),
    "logit_bias": _biases,
    "seed": _integer(-1, MAX_SEED),
    "stop": _stops,
    "logprobs": _boolean,
    "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
    "ignore_eos": _boolean,
}
