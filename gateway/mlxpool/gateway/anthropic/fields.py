"""The fields of requests of Anthropic's Messages, with their schemas."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_STOP_BYTES, MAX_STOPS
from mlxpool.common.protocol.chat import MAX_MESSAGES, MAX_TOOLS
from mlxpool.gateway.description.schemas import (
    ANY,
    API_CHECKS,
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
    other_tool,
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
    "plain_contents": "plain_contents",
}
CACHED: Mapping[str, Schema] = {"cache_control": ANY}  # the prefix cache needs no marks

THINKING = Body(
    {
        "type": choice("enabled", "disabled", "adaptive"),
        "display": described("omitted: thoughts are not sent", choice(*DISPLAYS)),
        "budget_tokens": described("of thoughts, which count towards max_tokens", integer(0)),
    },
    required=("type",),
    accepted={"block_tokens": ANY},
)
FORMAT = Body({"type": {"const": "json_schema"}, "schema": MAP}, required=("type", "schema"))
OUTPUT_CONFIG = Body(
    {
        "effort": described("of a model whose template knows levels", choice(*EFFORTS)),
        "format": FORMAT.schema(),
    },
    accepted={"task_budget": ANY},
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
    required=("name",),
    refused={"parameters": ((), "use `input_schema`")},
    open=True,  # nothing else of a declaration says what a call is
)
ANY_TOOL: Schema = one_of(
    TOOL.schema(),
    other_tool("custom"),
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
    "tools": listed(ANY_TOOL, 0, MAX_TOOLS),
    "tool_choice": TOOL_CHOICE.schema(),
    "thinking": THINKING.schema(),
    "output_config": OUTPUT_CONFIG.schema(),
    "output_format": described("the older form of output_config.format", FORMAT.schema()),
}
# Fields that say nothing about the answer, or ask for what has no meaning here.
ACCEPTED: Mapping[str, Schema] = {
    **CACHED,
    **dict.fromkeys(
        (
            "metadata",
            "service_tier",
            "container",  # of tools that the server runs, as is the next one
            "mcp_servers",
            "context_management",  # nothing is cleared or compacted
            "diagnostics",
            "inference_geo",
            "speed",
            "betas",
            "anthropic_beta",
            "anthropic_version",
            "fallbacks",
            "fallback_credit_token",
            "billing_policy",
            "mcp_toolsets",
            "user",
        ),
        ANY,
    ),
}
_REFUSED: RefusedFields = {
    "prefill": ((), "leave it out"),
    "compaction": ((), "ask for a summary in a message"),
    "thread": ((), "send the whole conversation"),
    "max_completion_tokens": ((), "use `max_tokens`"),
    "stop": ((), "use `stop_sequences`"),
}
MESSAGES = Body(
    {
        **PROMPT,
        "max_tokens": integer(1, MAX_COUNT),
        "stream": FLAG,
        **{name: option(target, API_CHECKS) for name, target in SAMPLING.items()},
        "stop_sequences": listed({"type": "string", "maxLength": MAX_STOP_BYTES}, 0, MAX_STOPS),
        "seed": integer(-1, MAX_SEED),
        "top_k": integer(-1, MAX_COUNT),
    },
    required=("model", "messages", "max_tokens"),
    accepted=ACCEPTED,
    refused=_REFUSED,
)
# Programs count the request that they are going to send.
COUNT_TOKENS = Body(
    PROMPT,
    ("model", "messages"),
    {**{name: ANY for name in MESSAGES.honoured if name not in PROMPT}, **ACCEPTED},
    _REFUSED,
)
