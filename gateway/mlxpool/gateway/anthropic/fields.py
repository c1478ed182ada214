"""The fields of requests of Anthropic's Messages, with their schemas."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_STOP_BYTES, MAX_STOPS
from mlxpool.common.protocol.chat import MAX_MESSAGES, MAX_TOOLS
from mlxpool.gateway.description.schemas import (
    ANY,
    FLAG,
    MAP,
    NAME,
    TEXT,
    Schema,
    choice,
    described,
    integer,
    listed,
    one_of,
    option,
)
from mlxpool.gateway.field_checks import Body, RefusedFields

ROLES = ("user", "assistant", "system")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DISPLAYS = ("summarized", "omitted")
EAGER = "eager_input_streaming"  # of a tool
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# field -> option of the pool
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "seed": "seed",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "ignore_eos": "ignore_eos",
}
CACHED: Mapping[str, Schema] = {"cache_control": ANY}  # the prefix cache needs no marks

THINKING = Body(
    {
        "type": choice("enabled", "disabled", "adaptive"),
        "display": described("omitted: thoughts are not sent", choice(*DISPLAYS)),
    },
    required=("type",),
    accepted={"budget_tokens": ANY},  # thoughts count towards max_tokens
)
FORMAT = Body({"type": {"const": "json_schema"}, "schema": MAP}, required=("type", "schema"))
OUTPUT_CONFIG = Body(
    {
        "effort": described("of a model whose template knows levels", choice(*EFFORTS)),
        "format": FORMAT.schema(),
    }
)
TOOL = Body(
    {
        "type": {"const": "custom"},
        "name": NAME,
        "description": TEXT,
        "input_schema": described("a JSON schema", MAP),
        "strict": FLAG,
        EAGER: described("arguments are streamed as the model writes them", FLAG),
    },
    required=("name", "input_schema"),
    accepted=CACHED,
    refused={
        "allowed_callers": ((["direct"], []), "leave it out"),
        "defer_loading": ((False,), "leave it out"),
        "input_examples": (([],), "say it in the description"),
    },
)
TOOL_CHOICE = Body(
    {
        "type": choice("auto", "any", "tool", "none"),
        "name": NAME,
        "disable_parallel_tool_use": FLAG,
    },
    required=("type",),
)
_BLOCK: Schema = {"type": "object", "properties": {"type": TEXT}, "required": ["type"]}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": choice(*ROLES),
        "content": described(
            "text, or blocks: text, image, tool_use, tool_result, thinking",
            one_of(TEXT, listed(_BLOCK)),
        ),
    },
    "required": ["role", "content"],
}
_TEXT_BLOCK: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
PROMPT: Mapping[str, Schema] = {
    "model": described("a name of /v1/models", NAME),
    "messages": listed(MESSAGE, 1, MAX_MESSAGES),
    "system": one_of(TEXT, listed(_TEXT_BLOCK)),
    "tools": listed(TOOL.schema(), 0, MAX_TOOLS),
    "tool_choice": TOOL_CHOICE.schema(),
    "thinking": THINKING.schema(),
    "output_config": OUTPUT_CONFIG.schema(),
}
_REFUSED: RefusedFields = {
    "container": ((), "there are no tools that the server runs"),
    "mcp_servers": (([],), "offer their tools in `tools`, and call them yourself"),
    # The one edit that asks for nothing: all thoughts stay.
    "context_management": (
        (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "leave out old messages yourself",
    ),
    "diagnostics": ((), "leave it out"),
    "inference_geo": ((), "leave it out"),
    "speed": (("standard",), "leave it out"),
    "prefill": ((), "leave it out"),
    "user_profile_id": ((), "use `metadata`"),
    "workspace_id": ((), "leave it out"),
    "max_completion_tokens": ((), "use `max_tokens`"),
    "stop": ((), "use `stop_sequences`"),
}
MESSAGES = Body(
    {
        **PROMPT,
        "max_tokens": integer(1, MAX_COUNT),
        "stream": FLAG,
        **{name: option(target) for name, target in SAMPLING.items()},
        "stop_sequences": listed(
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}, 0, MAX_STOPS
        ),
        "seed": integer(0, MAX_SEED),
        "top_k": integer(-1, MAX_COUNT),
    },
    required=("model", "messages", "max_tokens"),
    accepted={**CACHED, "metadata": ANY, "service_tier": ANY},
    refused=_REFUSED,
)
COUNT_TOKENS = Body(PROMPT, ("model", "messages"), CACHED, _REFUSED)
