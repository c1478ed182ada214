"""The fields of requests of OpenAI's Responses, with their schemas."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.options import MAX_COUNT, MAX_TOP_LOGPROBS
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
    other_tool,
)
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.queries import page_fields
from mlxpool.gateway.openai.fields import ACCEPTED, COMMON, EFFORT, OTHER_CHOICES, THINK
from mlxpool.gateway.openai.fields import SAMPLING as OF_CHATS
from mlxpool.gateway.openai.fields import TOOL as OF_CHATS_TOOL
from mlxpool.gateway.openai.fields import TOOL_CHOICE as OF_CHATS_CHOICE
from mlxpool.gateway.openai.neutral_values import NEUTRAL

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # most pairs, and characters of each
MESSAGE_ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
SUMMARIES = ("auto", "concise", "detailed")

# field -> option of the pool; the context's options are in `truncation`
SAMPLING: Mapping[str, str] = {
    name: target
    for name, target in OF_CHATS.items()
    if name not in ("truncate", "shift", "num_keep", "num_ctx")
}
FORMAT = Body(
    {"type": choice("text", "json_object", "json_schema"), "schema": MAP},
    required=("type",),
    accepted={"name": TEXT, "strict": FLAG, "description": TEXT},
)
TEXT_CONFIG = Body(
    {"format": FORMAT.schema()},
    accepted={"verbosity": TEXT},
)
REASONING = Body(
    {
        "effort": EFFORT,
        "max_tokens": described("OpenRouter's: the bound of thoughts", integer(0, MAX_COUNT)),
        "summary": described("the thoughts are sent as a summary", choice(*SUMMARIES, "none")),
        "generate_summary": described("the older form of `summary`", choice(*SUMMARIES)),
    },
    accepted={"context": ANY, "mode": ANY, "enabled": ANY, "exclude": ANY},
)
# The last event always has usage.
STREAM_OPTIONS = Body({}, accepted={"include_obfuscation": ANY, "include_usage": ANY})

_CONTENT = one_of(TEXT, listed(MAP))
ITEM = one_of(
    {
        "type": "object",
        "properties": {
            "type": {"const": "message"},
            "role": choice(*MESSAGE_ROLES),
            "content": described("text, or parts: input_text, input_image, output_text", _CONTENT),
        },
        "required": ["role", "content"],
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "function_call"},
            "call_id": NAME,
            "name": NAME,
            "arguments": described("a map, or its JSON text", one_of(TEXT, MAP)),
        },
        "required": ["type", "call_id", "name", "arguments"],
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "function_call_output"},
            "call_id": NAME,
            "output": _CONTENT,
        },
        "required": ["type", "call_id", "output"],
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "reasoning"},
            "content": {"type": ["array", "null"], "items": MAP},
            "summary": {"type": ["array", "null"], "items": MAP},
        },
        "required": ["type"],
    },
    described(
        "another type: calls and their results are kept as text, others are left out",
        other_tool("message", "function_call", "function_call_output", "reasoning"),
    ),
)
TOOL = Body(
    {
        "type": {"const": "function"},
        "name": NAME,
        "description": TEXT,
        "parameters": described("a JSON schema", MAP),
        "strict": FLAG,
    },
    required=("type", "name"),
    refused={"input_schema": ((), "use `parameters`")},
    open=True,  # other members only describe a call
)
ANY_TOOL: Schema = one_of(
    TOOL.schema(),
    OF_CHATS_TOOL,
    described(
        "a group of functions, which are offered as NAME__FUNCTION",
        {
            "type": "object",
            "properties": {"type": {"const": "namespace"}, "name": NAME, "tools": listed(MAP)},
            "required": ["type", "name", "tools"],
        },
    ),
    other_tool("function", "namespace"),
)
TOOL_CHOICE: Schema = one_of(
    choice("auto", "none", "required", "any"),
    *OTHER_CHOICES,
    OF_CHATS_CHOICE,
    {
        "type": "object",
        "properties": {
            "type": {"const": "allowed_tools"},
            "mode": choice("auto", "required"),
            "tools": listed(MAP, 1),
        },
        "required": ["type", "mode", "tools"],
    },
)
METADATA: Schema = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
}
RETRIEVED = Body(  # the query of GET /v1/responses/ID
    {
        "stream": FLAG,
        "starting_after": described("the number of the last event that the client has", integer(0)),
    },
    accepted={"include": TEXT, "include_obfuscation": FLAG},
)
INPUT_ITEMS = Body(page_fields(100), accepted={"include": TEXT})
RESPONSE = Body(
    {
        "model": described("a name of /v1/models", NAME),
        "input": one_of(TEXT, listed(ITEM, 1, MAX_MESSAGES)),
        "instructions": TEXT,
        "stream": FLAG,
        "stream_options": described("has no effect", STREAM_OPTIONS.schema()),
        "max_output_tokens": integer(1, MAX_COUNT),
        "tools": listed(ANY_TOOL, 0, MAX_TOOLS),
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": FLAG,
        "text": TEXT_CONFIG.schema(),
        "reasoning": REASONING.schema(),
        "think": THINK,
        "include": described(f"{LOGPROBS}; others have no effect", listed(TEXT)),
        "top_logprobs": described(
            f"with {LOGPROBS} in `include` only", integer(0, MAX_TOP_LOGPROBS)
        ),
        "truncation": described(
            "auto: the oldest items are left out until the rest fits", choice("auto", "disabled")
        ),
        "metadata": METADATA,
        "background": described("answered at once; the response goes on without a client", FLAG),
        "store": described("the response is kept; false unless `background`", FLAG),
        "previous_response_id": described("the id of a kept response that has ended", TEXT),
        "prompt_cache_key": COMMON["prompt_cache_key"],
        **{name: COMMON[name] for name in SAMPLING},
    },
    required=("model", "input"),
    accepted={
        **{name: schema for name, schema in ACCEPTED.items() if name not in ("metadata", "store")},
        "max_tool_calls": ANY,  # for tools that the server runs, which do not exist here
        "context_management": ANY,  # no context is compacted: see `truncation`
        "background_options": ANY,
        "access_programs": ANY,
    },
    refused={
        **NEUTRAL,
        "conversation": ((), "use `previous_response_id`, or send the whole conversation"),
        "prompt": ((), "prompts are not stored here: use `instructions` and `input`"),
        "image": ((), "leave it out"),
        "messages": ((), "this is /v1/responses: use `input`"),
        "max_tokens": ((), "use `max_output_tokens`"),
        "max_completion_tokens": ((), "use `max_output_tokens`"),
        "response_format": ((), "use `text.format`"),
        "reasoning_effort": ((), "use `reasoning.effort`"),
        "n": ((1,), "a response has one answer"),
    },
)
