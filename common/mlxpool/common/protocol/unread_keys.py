"""Keys of a `generate` that nobody reads: refused where the answer would be another one without
them, else warned of in `accepted`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.checks import did_you_mean, shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import ALIASES, CHECKS, REQUEST_KEYS
from mlxpool.common.protocol import choice, images, prompts

KNOWN = frozenset(
    {"model", *prompts.KEYS, images.KEY, "options", *REQUEST_KEYS, choice.KEY, "resume"}
)
_AS_FORMAT = "send `format` in `options`"
_AS_PROMPT = "render the prompt yourself and send it as `prompt`, or send `messages`"
_ADAPTER = "LoRA adapters are not applied: merge one into the weights of its model"
# What servers of other interfaces know, and what to do instead.
REFUSED: Mapping[str, str] = {
    "response_format": _AS_FORMAT,
    "grammar": _AS_FORMAT,
    "audio": "models take text and images only",
    "video": "models take text and images only",
    "lora": _ADAPTER,
    "adapter": _ADAPTER,
    "adapters": _ADAPTER,
    "system": _AS_PROMPT,
    "template": _AS_PROMPT,
    "context": "send the conversation as `messages`",
    "tool_choice": "leave `tools` out where the model is to call none",
    "n": "send a request for each completion, with seed + i and `choice`",
    "best_of": "send a request for each completion, with seed + i and `choice`",
}
MAX_WARNINGS = 8  # keys that are named
MAX_KEY = 60  # characters of a key that are shown


def check_keys(body: Mapping[Any, Any]) -> tuple[str, ...]:
    """Returns a warning for each key that is ignored; nil counts as absent.

    Raises BadRequest for a key of REFUSED, and for an option that stands beside `options`.
    """
    ignored = [key for key, value in body.items() if value is not None and key not in KNOWN]
    for key in ignored:
        if key in REFUSED:
            raise BadRequest(f"{key} is not supported: {REFUSED[key]}")
        if key in CHECKS or key in ALIASES:
            raise BadRequest(f"{key!r} is an option: send it in `options`")
    return tuple(map(_warning, ignored[:MAX_WARNINGS])) + _further(ignored[MAX_WARNINGS:])


def _warning(key: object) -> str:
    return f"the unknown key {shown(key)} is ignored{_hint(str(key)[:MAX_KEY])}"


@functools.lru_cache(maxsize=256)  # all lines of a batch have the same keys
def _hint(key: str) -> str:
    return did_you_mean(key, KNOWN)


def _further(ignored: Sequence[object]) -> tuple[str, ...]:
    return (f"{len(ignored)} further unknown keys are ignored",) if ignored else ()
