"""The lines of a batch: JSON objects, each of which is a request.

A line has the keys of a `generate` (docs/protocol.md), and `id`, the client's name for the line. If
the line has a `kind`, such as `embed`, it has the keys of this call instead. JSON has no blobs, so
`tokens` is a list of token ids (in a call, a list of lists), and `images` a list of files in
base64. Clients check lines before they send them, and the broker checks them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from msgspec import Struct

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest, PoolError, TooLarge
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept.job_messages import Submit
from mlxpool.common.protocol.kept.job_work import kind_of
from mlxpool.common.protocol.kept.packed_requests import packed_request

MAX_LINE = 4 * 1024 * 1024  # bytes of JSON
MAX_LABEL = 256  # the most characters of an `id`
# Keys that belong to the batch: they are the same for all its lines.
OF_BATCHES = ("keep_ms", "not_before", "deadline_ms", "priority", "key", "tenant")
NOT_OF_LINES = {  # refused key -> error that names the right request for it
    "notify": "notify is of the batch: give it there to get a notice of the batch's end",
    "note": "note is only for a job that is submitted alone, not for a line",
}
# Keys that can have a default in a batch; for calls only `model` can.
DEFAULTS = ("model", "options", "tools", "think", "session")
OF_CLIENTS = "asked"  # key that the pool ignores; a gateway stores settings of its answer in it


class Line(Struct, frozen=True):
    """A line that can become a job. `label` is the line's `id`, `packed` its request's body."""

    label: str
    packed: bytes
    blobs: tuple[bytes, ...]
    submit: Submit


class BadLine(Exception):
    """A line that cannot become a job, and the reason. `label` is the line's `id`, if readable."""

    def __init__(self, label: str, error: PoolError) -> None:
        super().__init__(error.message)
        self.label = label
        self.error = error


def check_defaults(defaults: object) -> Mapping[str, Any]:
    """Returns the default keys of lines. Raises BadRequest if a key is not in DEFAULTS."""
    if not isinstance(defaults, Mapping):
        raise BadRequest(f"defaults must be a map, got {shown(defaults)}")
    for key in defaults:
        if key not in DEFAULTS:
            raise BadRequest(
                f"defaults can have {', '.join(DEFAULTS)}, got {shown(key)}; give it in each line"
            )
    if not isinstance(defaults.get("options") or {}, Mapping):
        raise BadRequest(f"options must be a map, got {shown(defaults['options'])}")
    return defaults


def parse_line(data: bytes, defaults: Mapping[str, Any]) -> Line:
    """Checks one line, given without its line end. Raises BadLine."""
    try:
        _check_size(len(data))
        line = _object(data)
    except PoolError as error:
        raise BadLine("", error) from None
    return _checked(line, defaults)


def check_line(line: Mapping[str, Any], size: int) -> Line:
    """Checks a line that is given as a map. `size` is its number of bytes as JSON text.

    Raises BadLine.
    """
    try:
        _check_size(size)
    except PoolError as error:
        raise BadLine("", error) from None
    return _checked(dict(line), {})


def _check_size(size: int) -> None:
    if size > MAX_LINE:
        raise TooLarge(f"the line has more than {MAX_LINE} bytes")


def _checked(line: dict[str, Any], defaults: Mapping[str, Any]) -> Line:
    label = ""
    try:
        label = _label(line.pop("id", None))
        line.pop(OF_CLIENTS, None)
        body, blobs = _request(line, defaults)
        packed = _packed(body, blobs)
        return Line(label, packed, blobs, Submit.parse({**body, "key": "line"}, blobs))
    except PoolError as error:
        raise BadLine(label, error) from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"no JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"must be a JSON object, got {shown(value)}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _label(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_LABEL or not value.isprintable():
        raise BadRequest(f"id must be at most {MAX_LABEL} printable characters, got {shown(value)}")
    return value


def _request(
    line: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Returns body and blobs of the request in a line. Raises BadRequest and TooLarge."""
    for key in OF_BATCHES:
        if line.get(key) is not None:
            raise BadRequest(f"{key} is of the batch: give it there, for all lines")
    for key, why in NOT_OF_LINES.items():
        if line.get(key) is not None:
            raise BadRequest(why)
    if kind_of(line) == Generate.kind:
        return packed_request(_with_defaults(line, defaults))
    return packed_request({"model": defaults["model"], **line} if "model" in defaults else line)


def _with_defaults(line: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a line. A key or option that the line lacks has the batch's default."""
    options = line.get("options")
    if not isinstance(options, dict | None):
        raise BadRequest(f"options must be an object, got {shown(options)}")
    body = {**defaults, **line, "options": {**(defaults.get("options") or {}), **(options or {})}}
    if "messages" not in body:  # tools and thinking go only with messages
        for key in {"tools", "think"} - line.keys():
            body.pop(key, None)
    return body


def _packed(body: Mapping[str, Any], blobs: tuple[bytes, ...]) -> bytes:
    """Returns the packed body. Raises TooLarge or BadRequest if a message cannot have this body."""
    frames.check_shape(body, frames.MAX_DEPTH)
    return frames.encode(Header(Submit.kind), body, blobs)[1]
