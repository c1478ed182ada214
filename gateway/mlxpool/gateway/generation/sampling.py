"""Options of drawing tokens in requests of OpenAI's and Anthropic's interfaces. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.description.schemas import API_CHECKS
from mlxpool.gateway.errors import bad_request

MAX_CACHE_KEY = 256  # characters of prompt_cache_key

# The defaults of these interfaces where they differ from the pool's.
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repeat_last_n": -1,
}


def sampling_options(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The pool's options, with these defaults; `names`: field -> option. Raises HttpError.

    A `seed` of -1 is a drawn one, a `top_k` of -1 is off: so other servers have it.
    """
    given = {**body, "top_k": 0} if body.get("top_k") == -1 else body
    options = {**DEFAULTS, **fields.options(given, names, checks=API_CHECKS)}
    if options.get("seed") == -1:
        del options["seed"]  # choice i of a request has seed + i
    return options


def session_option(body: Mapping[str, Any]) -> dict[str, Any]:
    """The pool's option `session` of `prompt_cache_key`; empty without. Raises HttpError."""
    session = fields.text(body, "prompt_cache_key", "")
    if len(session) > MAX_CACHE_KEY:
        message = (
            f"'prompt_cache_key' has {len(session)} characters, at most {MAX_CACHE_KEY} are allowed"
        )
        raise bad_request(message, "prompt_cache_key")
    return {"session": session} if session else {}
