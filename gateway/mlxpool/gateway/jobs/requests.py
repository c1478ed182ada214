"""Requests about jobs: their fields with schemas, and the checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import is_number, shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import CHECKS, MAX_DEADLINE_MS
from mlxpool.common.protocol.chat import (
    LEVELS,
    MAX_MESSAGES,
    MAX_TOOLS,
    check_messages,
    check_tools,
)
from mlxpool.common.protocol.decisions import MAX_QUESTIONS
from mlxpool.common.protocol.encoder_calls import MAX_INPUTS
from mlxpool.common.protocol.from_client import MAX_PRIORITY, Generate
from mlxpool.common.protocol.images import MAX_IMAGES
from mlxpool.common.protocol.kept.job_messages import (
    IDLE,
    JOB_STATES,
    MAX_KEEP_MS,
    MAX_LISTED,
    job_key,
)
from mlxpool.common.protocol.kept.job_work import KIND, KINDS, kind_of, parse_work
from mlxpool.common.protocol.kept.packed_requests import packed_request
from mlxpool.common.protocol.resume import MAX_TIME
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.description.schemas import (
    FLAG,
    MAP,
    NAME,
    TEXT,
    TOKEN_IDS,
    Schema,
    choice,
    described,
    integer,
    listed,
    one_of,
    option,
)
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.images import image_list

MAX_NUMBER = 2**53  # greatest `seq`, `end_seq`, generation and index of an id in a query
MAX_POOLS = 1000  # most pools of one gateway
MAX_KEY = 256  # characters
OPTIONS = Body({name: MAP if name == "format" else option(name) for name in CHECKS})
IN_OPTIONS = {name: f"options.{name}" for name in CHECKS}
_KEEP: Schema = {"type": "number", "minimum": 0, "maximum": MAX_KEEP_MS / 1000}
_TIME: Schema = {"type": "number", "minimum": 0, "maximum": MAX_TIME}
_KEY: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_KEY}
JOB = Body(
    {
        "model": described("a name of /v1/models", NAME),
        "prompt": described("text; one of prompt, messages and tokens", TEXT),
        "messages": listed(MAP, 1, MAX_MESSAGES),
        "tokens": described(
            "for a call also a list of such lists",
            one_of(TOKEN_IDS, listed(TOKEN_IDS, 1, MAX_INPUTS)),
        ),
        "images": described("files in base64", listed(TEXT, 0, MAX_IMAGES)),
        "tools": listed(MAP, 0, MAX_TOOLS),
        "think": one_of(FLAG, choice(*LEVELS)),
        "options": described("the pool's options (docs/protocol.md, `generate`)", OPTIONS.schema()),
        "session": TEXT,
        "key": described("names the job; absent: Idempotency-Key, or a random one", _KEY),
        "keep": described("seconds that the result is kept", _KEEP),
        "not_before": described("seconds since 1970", _TIME),
        "notify": described("the URL that receives its end", TEXT),
        "priority": integer(IDLE, MAX_PRIORITY),
        "deadline_ms": integer(1, MAX_DEADLINE_MS),
        KIND: described("absent: generate; of a call (docs/protocol.md) its keys", choice(*KINDS)),
        "inputs": one_of(TEXT, listed({}, 1, MAX_INPUTS)),
        "documents": listed(TEXT, 1, MAX_INPUTS),
        "query": TEXT,
        "questions": listed(MAP, 1, MAX_QUESTIONS),
        "temperature": {"type": "number"},
        "truncate": FLAG,
        "dimensions": integer(1),
        "normalise": FLAG,
        "prompt_name": TEXT,
    },
    required=("model",),
)
OF_CALLS = frozenset(
    {"inputs", "documents", "query", "questions", "temperature", "truncate", "dimensions"}
    | {"normalise", "prompt_name"}
)  # fields that a `generate` does not have
LISTED = Body(  # the query of GET /v1/jobs
    {
        "state": choice(*JOB_STATES),
        "after": described("the `end_seq` after which ended jobs are listed", integer(0)),
        "before": described("the `seq` before which jobs are listed, newest first", integer(0)),
        "limit": integer(1, MAX_LISTED),
        "pool": described("with several pools: its number, from 1", integer(1, MAX_POOLS)),
    }
)
EVENTS = Body(  # the query of GET /v1/jobs/ID/events
    {
        "from": described("the index of the first id", integer(0)),
        "gen": described("the generation of the ids before it", integer(0)),
    }
)
PROMPTS = ("prompt", "messages", "tokens")
OF_JOBS = ("key", "keep", "not_before", "notify", "priority", "deadline_ms")


class JobRequest(Struct, frozen=True):
    """A checked job: the model, the job's key, and the arguments of `submit`.

    Without a key, the job gets a random key. A call, such as an embedding, has a `kind`, and the
    arguments of `submit_call`.
    """

    model: str
    key: str | None
    arguments: Mapping[str, Any]
    kind: str = Generate.kind


def job(body: Mapping[str, Any], idempotency: str | None = None) -> JobRequest:
    """Checks the body of POST /v1/jobs; `idempotency`: the header Idempotency-Key.

    Raises HttpError naming the field.
    """
    body = JOB.check(body, elsewhere=IN_OPTIONS)
    kind: str = fields.checked(KIND, lambda _: kind_of(body), body.get(KIND))
    arguments = {
        **(_generate(body) if kind == Generate.kind else _call(body)),
        "keep": _seconds(body, "keep", MAX_KEEP_MS / 1000),
        "not_before": _seconds(body, "not_before", MAX_TIME),
        "notify": fields.text(body, "notify", "") or None,
        "priority": fields.integer(body, "priority", IDLE, MAX_PRIORITY),
        "deadline_ms": fields.integer(body, "deadline_ms", 1, MAX_DEADLINE_MS),
    }
    present = {name: value for name, value in arguments.items() if value is not None}
    return JobRequest(fields.text(body, "model"), _key(body, idempotency), present, kind)


def _generate(body: Mapping[str, Any]) -> dict[str, Any]:
    of_calls = next((name for name in OF_CALLS if body.get(name) is not None), None)
    if of_calls is not None:
        other = f", or give {IN_OPTIONS[of_calls]!r}" if of_calls in IN_OPTIONS else ""
        raise bad_request(
            f"{of_calls!r} is only for calls: set 'kind', for example to 'embed'{other}", of_calls
        )
    prompts = [name for name in PROMPTS if body.get(name) is not None]
    if len(prompts) != 1:
        raise bad_request(
            f"give one of prompt, messages, tokens; got {prompts or 'none'}", "prompt"
        )
    session = fields.text(body, "session", "") or None
    return {**_options(body), **_prompt(body), "session": session}


def _call(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, checked as its worker would check them."""

    def check(call_keys: Any) -> None:
        parse_work(*packed_request(call_keys))

    keys = {name: body[name] for name in body if name not in OF_JOBS and body[name] is not None}
    fields.checked(KIND, check, keys)
    return {name: value for name, value in keys.items() if name not in (KIND, "model")}


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    options = fields.mapping(body, "options")
    OPTIONS.check(options, "options.")
    return fields.options(options, {name: name for name in CHECKS}, "options.")


def _prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prompt and its additions: images, tools, thinking."""
    prompt: dict[str, Any] = {"images": image_list("images", body.get("images"), "images")}
    if body.get("prompt") is not None:
        prompt["prompt"] = fields.text(body, "prompt", "")
    if body.get("tokens") is not None:
        prompt["tokens"] = fields.checked("tokens", _ids, body["tokens"])
    of_chats = {name: body[name] for name in ("tools", "think") if body.get(name) is not None}
    if of_chats.get("tools") == []:
        del of_chats["tools"]
    if body.get("messages") is None:
        if of_chats:
            raise bad_request(
                f"{next(iter(of_chats))!r} goes with 'messages'", next(iter(of_chats))
            )
        return prompt
    prompt["messages"] = fields.checked("messages", check_messages, body["messages"])
    if "tools" in of_chats:
        prompt["tools"] = fields.checked("tools", check_tools, of_chats["tools"])
    think = of_chats.get("think")
    if think is not None:
        if think not in LEVELS and not isinstance(think, bool):
            known = f"true, false or one of {', '.join(LEVELS)}"
            raise bad_request(f"'think' is {shown(think)}, must be {known}", "think")
        prompt["think"] = think
    return prompt


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise BadRequest(f"'tokens' must be a list of token ids, got {shown(value)}")
    pack_ids(value)
    return value


def _seconds(body: Mapping[str, Any], name: str, most: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not is_number(value) or not 0 <= value <= most:
        message = f"{name!r} is {shown(value)}, must be seconds from 0 to {most:.0f}"
        raise bad_request(message, name)
    return float(value)


def _key(body: Mapping[str, Any], idempotency: str | None) -> str | None:
    key = body.get("key")
    if key is None:
        key = idempotency
    elif idempotency is not None and idempotency != key:
        message = f"'key' is {shown(key)} and Idempotency-Key {idempotency!r:.60}; give one of them"
        raise bad_request(message, "key")
    checked_key: str | None = None if key is None else fields.checked("key", job_key, key)
    return checked_key
