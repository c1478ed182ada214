"""From the arguments of a call to the body and blobs of a message."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxpool.client.stream import StreamState
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import REQUEST_KEYS
from mlxpool.common.protocol.frames import TEXT_AS_BLOB
from mlxpool.common.protocol.token_ids import pack_ids

FIRST_ONLY = frozenset({"queue_ms", "first_token_ms"})  # bounds on what lies behind a re-send


def generate(
    model: str,
    prompt: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    tokens: Sequence[int] | None,
    options: Mapping[str, Any],
) -> tuple[dict[str, Any], list[bytes]]:
    """Body and blobs of `generate`; keys of the request itself are told from sampling options."""
    given = [value for value in (prompt, messages, tokens) if value is not None]
    if len(given) != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {len(given)}")
    body: dict[str, Any] = {"model": model, "batch": True}  # one frame a step for all streams
    body.update({k: v for k, v in options.items() if k in REQUEST_KEYS and v is not None})
    body["options"] = {k: v for k, v in options.items() if k not in REQUEST_KEYS and v is not None}
    if isinstance(body["options"].get("logit_bias"), Mapping):  # maps on the wire have text keys
        biases = body["options"]["logit_bias"]
        body["options"]["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    if messages is not None:
        return {**body, "messages": _maps(messages)}, []
    if tokens is not None:
        ids = pack_ids(tokens)
        if not ids:
            raise BadRequest("tokens has no id; a prompt is 1 or more")
        return {**body, "tokens": True}, [ids]
    value, blobs = text(prompt)
    return {**body, "prompt": value}, blobs


def _maps(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = list(messages) if isinstance(messages, Iterable) else [messages]
    if not all(isinstance(one, Mapping) for one in found):
        raise BadRequest(f"messages must be a list of maps, got {messages!r:.60}")
    return [dict(one) for one in found]


def again(
    body: Mapping[str, Any], blobs: Sequence[bytes], state: StreamState, left: float | None
) -> tuple[dict[str, Any], list[bytes]]:
    """The same request from the ids that we have; `left`: seconds to the user's own deadline.

    A request that was never accepted has no seed to go on with: it is sent as it was.
    """
    kept = {key: value for key, value in body.items() if key not in FIRST_ONLY}
    if left is not None:
        kept["deadline_ms"] = max(1, math.ceil(left * 1000))
    if not state.boot:
        return kept, list(blobs)
    resume: dict[str, Any] = {
        "count": len(state.ids),
        "seed": state.seed,
        "resumes": state.barren_boots,
    }
    if state.facts is not None:
        resume["facts"] = dict(state.facts)
    return {**kept, "resume": resume}, [*blobs, pack_ids(state.ids)]


def deadline(body: Mapping[str, Any]) -> float | None:
    """The user's own deadline in seconds; what is none, the broker refuses."""
    given = body.get("deadline_ms")
    return given / 1000 if type(given) is int and given > 0 else None


def text(value: Any) -> tuple[Any, list[bytes]]:
    """Text as it travels: in the body, or as a blob when it is long. Raises BadRequest for none."""
    if not isinstance(value, str):
        raise BadRequest(f"a text must be a str, got {value!r:.60}")
    data = value.encode("utf-8", "surrogatepass")
    return (True, [data]) if len(data) > TEXT_AS_BLOB else (value, [])
