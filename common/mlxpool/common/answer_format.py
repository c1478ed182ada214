"""Checks of the option `format`, which constrains the text of an answer. Needs no grammar library.

A format is a map with the key `type` and, for most types, one other key, see KEYS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest

FORMAT = "format"  # feature of a model that supports formats

# a format's type -> its other key; "": no other key
KEYS: Mapping[str, str] = {
    "json": "",
    "json_schema": "schema",
    "regex": "pattern",
    "choice": "choices",
    "lark": "grammar",
}
MAX_FORMAT_BYTES = 128 * 1024  # the most bytes of a format as JSON text
MAX_CHOICES = 1024


def check_format(name: str, value: Any) -> dict[str, Any]:
    """Returns the unchanged format. Raises BadRequest naming the wrong key and its bound.

    The worker that prepares the request checks whether it supports the schema or pattern.
    """
    if not isinstance(value, Mapping):
        raise BadRequest(f"option {name!r} must be a map with a type, got {shown(value)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        raise BadRequest(
            f"option {name!r} has the type {shown(kind)}, must be one of {', '.join(KEYS)}"
        )
    key = KEYS[kind]
    unknown = [other for other in value if other not in ("type", key)]
    if unknown:
        raise BadRequest(
            f"option {name!r} of type {kind!r} has the unknown key {shown(unknown[0])}"
        )
    if key:
        if key not in value:
            raise BadRequest(f"option {name!r} of type {kind!r} needs the key {key!r}")
        _CHECKS[kind](f"{name}.{key}", value[key])
    size = size_of(value, name)
    if size > MAX_FORMAT_BYTES:
        raise BadRequest(f"option {name!r} has {size} bytes as JSON, at most {MAX_FORMAT_BYTES}")
    return dict(value)


def size_of(value: Any, name: str = "format") -> int:
    """Returns the bytes of a format as JSON; 0 for None. Raises BadRequest if it is not JSON."""
    return 0 if value is None else len(text_of(value, name).encode("utf-8", "surrogatepass"))


def text_of(value: Any, name: str = "format") -> str:
    """Returns a format as JSON text; maps keep the order of their keys.

    Raises BadRequest if it is not JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"option {name!r} is not JSON: {error}") from None


def _schema(name: str, value: Any) -> None:
    if not isinstance(value, Mapping | bool):
        raise BadRequest(f"option {name!r} must be a JSON schema, got {shown(value)}")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"option {name!r} must be text, got {shown(value)}")


def _choices(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_CHOICES:
        raise BadRequest(
            f"option {name!r} must be a list of 1 to {MAX_CHOICES} texts, got {shown(value)}"
        )
    for choice in value:
        _text(name, choice)


_CHECKS = {"json_schema": _schema, "regex": _text, "choice": _choices, "lark": _text}
