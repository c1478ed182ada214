"""JSON schemas of block-structured answers: OpenAI's Responses and Anthropic's Messages.

The module `answers` has the schemas of all other answers.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.gateway.description.schemas import (
    ANY,
    COUNT,
    FLAG,
    MAP,
    MAP_OR_NULL,
    NULL,
    TEXT,
    TEXT_OR_NULL,
    Schema,
    choice,
    listed,
    one_of,
    record,
    ref,
)

# The members of OpenAI's lists, except `data`.
LIST: Mapping[str, Schema] = {
    "object": {"const": "list"},
    "first_id": TEXT_OR_NULL,
    "last_id": TEXT_OR_NULL,
    "has_more": FLAG,
}

_COUNT_OR_NULL: Schema = {"type": ["integer", "null"]}
_BATCH_TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

# ---- OpenAI's Responses ----------------------------------------------------------------------

_RESPONSE_USAGE = record(
    {
        "input_tokens": COUNT,
        "input_tokens_details": record({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": record({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
_ECHOED = (  # members of a response that repeat its request
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)

RESPONSES: Mapping[str, Schema] = {
    "Response": record(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "model": TEXT,
            "status": choice(
                "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
            ),
            "output": listed(ref("ResponseItem")),
            "error": one_of(record({"code": TEXT, "message": TEXT}), NULL),
            "incomplete_details": one_of(record({"reason": {"const": "max_output_tokens"}}), NULL),
            "usage": one_of(_RESPONSE_USAGE, NULL),
        },
        {
            **dict.fromkeys(_ECHOED, ANY),
            "background": FLAG,
            "previous_response_id": TEXT_OR_NULL,
            "service_tier": TEXT,
            "store": FLAG,
        },
    ),
    "ResponseItem": record(
        {
            "id": TEXT,
            "type": choice("message", "function_call", "reasoning"),
            "status": choice("in_progress", "completed", "incomplete"),
        },
        {
            "role": {"const": "assistant"},
            "content": listed(ref("ResponsePart")),
            "summary": listed(ref("ResponsePart")),
            "encrypted_content": NULL,
            "call_id": TEXT,
            "name": TEXT,
            "arguments": TEXT,
        },
    ),
    "ResponsePart": record(
        {"type": choice("output_text", "reasoning_text", "summary_text"), "text": TEXT},
        {"annotations": listed(MAP), "logprobs": listed(MAP)},
    ),
    "ResponseEvent": record(
        {"type": TEXT, "sequence_number": COUNT},
        {
            "response": ref("Response"),
            "item": ref("ResponseItem"),
            "part": ref("ResponsePart"),
            "item_id": TEXT,
            "output_index": COUNT,
            "content_index": COUNT,
            "summary_index": COUNT,
            "delta": TEXT,
            "text": TEXT,
            "name": TEXT,
            "arguments": TEXT,
            "logprobs": listed(MAP),
            "code": TEXT,
            "message": TEXT,
            "param": NULL,
        },
    ),
    "File": record(
        {
            "id": TEXT,
            "object": {"const": "file"},
            "bytes": COUNT,
            "created_at": COUNT,
            "filename": TEXT,
            "purpose": choice("batch", "batch_output"),
            "status": TEXT,
        },
        {"expires_at": _COUNT_OR_NULL, "status_details": NULL},
    ),
    "FileList": record({**LIST, "data": listed(ref("File"))}),
    "Batch": record(
        {
            "id": TEXT,
            "object": {"const": "batch"},
            "endpoint": TEXT,
            "input_file_id": TEXT,
            "completion_window": TEXT,
            "status": choice(
                "in_progress",
                "finalizing",
                "completed",
                "failed",
                "expired",
                "cancelling",
                "cancelled",
            ),
            "created_at": COUNT,
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        },
        {
            "errors": one_of(record({"object": {"const": "list"}, "data": listed(MAP)}), NULL),
            "output_file_id": TEXT_OR_NULL,
            "error_file_id": TEXT_OR_NULL,
            "metadata": MAP_OR_NULL,
            **dict.fromkeys(_BATCH_TIMES, _COUNT_OR_NULL),
        },
    ),
    "BatchList": record({**LIST, "data": listed(ref("Batch"))}),
    "ResponseItems": record({**LIST, "data": listed(MAP)}),
}

# ---- Anthropic's Messages --------------------------------------------------------------------

_CONTENT_BLOCK = record(
    {"type": choice("text", "thinking", "tool_use")},
    {
        "text": TEXT,
        "citations": NULL,
        "thinking": TEXT,
        "signature": TEXT,
        "id": TEXT,
        "name": TEXT,
        "input": MAP,
    },
)
_STOP_REASON = choice(
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded", None
)
_ENDING: Mapping[str, Schema] = {"stop_reason": _STOP_REASON, "stop_sequence": TEXT_OR_NULL}
_MESSAGE_USAGE = record(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    },
    {"output_tokens_details": record({"thinking_tokens": COUNT})},
)
ANTHROPIC: Mapping[str, Schema] = {
    "AnthropicError": record(
        {"type": {"const": "error"}, "error": record({"type": TEXT, "message": TEXT})},
        {"request_id": TEXT},
    ),
    "AnthropicMessage": record(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": listed(_CONTENT_BLOCK),
            **_ENDING,
            "usage": _MESSAGE_USAGE,
        }
    ),
    "AnthropicEvent": record(
        {"type": TEXT},
        {
            "message": ref("AnthropicMessage"),
            "index": COUNT,
            "content_block": _CONTENT_BLOCK,
            "delta": record(
                {},
                {
                    **_ENDING,
                    "type": TEXT,
                    "text": TEXT,
                    "thinking": TEXT,
                    "signature": TEXT,
                    "partial_json": TEXT,
                },
            ),
            "usage": _MESSAGE_USAGE,
            "error": record({"type": TEXT, "message": TEXT}),
            "request_id": TEXT,
        },
    ),
    "AnthropicCount": record({"input_tokens": COUNT}),
}
