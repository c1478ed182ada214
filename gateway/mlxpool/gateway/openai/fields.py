"""The fields of requests of OpenAI's interface and related paths, one table for each path.

The parsers check names against these tables, openapi.json is made from them, and docs/gateway.md
documents the same fields for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.options import MAX_COUNT, MAX_SEED, MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import MAX_MESSAGES, MAX_TOOLS, ROLES
from mlxpool.common.protocol.choice import MAX_CHOICES
from mlxpool.common.protocol.decisions import (
    MAX_CHOICE_CHARS,
    MAX_QUESTION_CHARS,
    MAX_QUESTIONS,
    MAX_SCALE,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
)
from mlxpool.common.protocol.decisions import MAX_CHOICES as MAX_LABELS
from mlxpool.gateway.description.schemas import (
    ANY,
    API_CHECKS,
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
    other_tool,
)
from mlxpool.gateway.field_checks import Body, RefusedFields
from mlxpool.gateway.generation.pool_options import MAX_CACHE_KEY, OF_CHATS, OF_COMPLETIONS
from mlxpool.gateway.openai.neutral_values import NEUTRAL, WITHOUT_EFFECT

MAX_INPUTS = 2048  # most inputs of one request for vectors, as in OpenAI's interface
MAX_TOP = 2**31 - 1
FORMATS = ("float", "base64")
UNBOUNDED: Schema = {
    "type": "integer",
    "const": -1,
}  # no bound of tokens, as clients of Ollama, llama.cpp and LM Studio send it

# field -> option of the pool
SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "repeat_penalty": "repeat_penalty",  # llama.cpp's and LM Studio's name
    "repeat_last_n": "repeat_last_n",
    "ignore_eos": "ignore_eos",
    "truncate": "truncate",
    "shift": "shift",
    "num_keep": "num_keep",
    "num_ctx": "num_ctx",
    "thinking_budget": "thinking_budget",
    "thinking_token_budget": "thinking_budget",  # vLLM's name
}
# Fields that do not change the answer, or that have no meaning here.
ACCEPTED: Mapping[str, Schema] = dict.fromkeys(
    (
        "user",
        "store",  # a field of the provider's log of chats: nothing is kept
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_retention",
        "prompt_cache_options",
        "cache_control",  # the prefix cache needs no marks
        "cache_salt",
        "verbosity",
        "moderation",
        "web_search_options",  # nothing is searched
        "search_parameters",
        "provider",  # OpenRouter's, for the choice among servers
        "models",
        "route",
        "transforms",
        "plugins",
        "usage",
        "include_reasoning",
        "reasoning_format",
        "reasoning_split",
        "stream_reasoning",
        "separate_reasoning",
        "tool_stream",
        "extra_body",
        "guardrails",
        "vl_high_resolution_images",
        "include_stop_str_in_output",
        "return_token_ids",
        "kv_transfer_params",
        "cache_prompt",  # llama.cpp's, about slots and timings, like the next three
        "id_slot",
        "timings_per_token",
        "return_progress",
        "mock_response",
        "api_key",
        "base_url",
        "timeout",
        "max_retries",
        *WITHOUT_EFFECT,
    ),
    ANY,
)
STREAM_OPTIONS = Body(
    {"include_usage": FLAG},
    # Usage is sent only at the end.
    accepted={"include_obfuscation": ANY, "continuous_usage_stats": ANY},
)
CHAT_TEMPLATE_KWARGS = Body(
    {
        "enable_thinking": FLAG,
        "thinking": described("the name of `enable_thinking` in other templates", FLAG),
        "thinking_budget": option("thinking_budget"),
    },
    # The template decides which thoughts of earlier answers a prompt has.
    accepted={"preserve_thinking": ANY, "clear_thinking": ANY},
)

MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": choice(*ROLES),
        "content": one_of(
            TEXT,
            described("parts of text, and images as data URLs", listed(MAP)),
            {"type": "null"},
        ),
        "name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": MAP},
        "tool_call_id": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
        "reasoning": described("the same", {"type": ["string", "null"]}),
    },
    "required": ["role"],
}
TOOL: Schema = one_of(
    {
        "type": "object",
        "properties": {
            "type": choice("function", "", None),
            "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
        },
        "required": ["function"],
    },
    other_tool("function"),
)
TOOL_CHOICE: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": NAME}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
OTHER_CHOICES: Sequence[Schema] = (  # see requests.plain_choice
    {
        "type": "object",
        "properties": {"type": choice("auto", "none", "required", "any")},
        "required": ["type"],
    },
    {
        "type": "object",
        "properties": {"type": choice("function", "tool"), "name": NAME},
        "required": ["type", "name"],
    },
)
ALLOWED_TOOLS: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": choice("auto", "required"), "tools": listed(TOOL, 1)},
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
PROMPT = one_of(
    TEXT, TOKEN_IDS, listed(one_of(TEXT, TOKEN_IDS), 1, MAX_CHOICES)
)  # a text, token ids, or a list of either

COMMON: Mapping[str, Schema] = {
    "model": described("a name of /v1/models", NAME),
    "n": integer(1, MAX_CHOICES),
    "stream": FLAG,
    "stream_options": described("has no effect without `stream`", STREAM_OPTIONS.schema()),
    "max_tokens": described("-1: up to the context", one_of(integer(1, MAX_COUNT), UNBOUNDED)),
    "prompt_cache_key": {"type": "string", "maxLength": MAX_CACHE_KEY},
    **{name: option(target, API_CHECKS) for name, target in SAMPLING.items()},
    "seed": described("-1: a random one", integer(-1, MAX_SEED)),
    "top_k": integer(-1, MAX_COUNT),  # -1 and 0: off
    "prompt_logprobs": described(
        "log-probabilities of the prompt with this many alternatives", integer(0, MAX_TOP_LOGPROBS)
    ),
}
EFFORTS: Mapping[str, str] = {  # level names of clients -> levels of the pool
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
EFFORT = choice("none", *EFFORTS)
THINK: Schema = described("Ollama's", one_of(FLAG, EFFORT))
REASONING = Body(  # OpenRouter's
    {
        "effort": EFFORT,
        "max_tokens": described("the bound of thoughts", integer(0, MAX_COUNT)),
        "enabled": FLAG,
    },
    accepted=dict.fromkeys(("summary", "generate_summary", "exclude", "context", "mode"), ANY),
)
CHAT = Body(
    {
        **COMMON,
        **OF_CHATS,
        "messages": listed(MESSAGE, 1, MAX_MESSAGES),
        "tools": listed(TOOL, 0, MAX_TOOLS),
        "parallel_tool_calls": FLAG,
        "tool_choice": one_of(
            choice("auto", "none", "required", "any"), TOOL_CHOICE, ALLOWED_TOOLS, *OTHER_CHOICES
        ),
        "logprobs": FLAG,
        "top_logprobs": described("with `logprobs` only", integer(0, MAX_TOP_LOGPROBS)),
        "max_completion_tokens": one_of(integer(1, MAX_COUNT), UNBOUNDED),
        "reasoning_effort": EFFORT,
        "reasoning": described("OpenRouter's", REASONING.schema()),
        "thinking": {
            "type": "object",
            "properties": {"type": choice("enabled", "disabled", "adaptive", None)},
        },
        "enable_thinking": FLAG,
        "think": THINK,
        "chat_template_kwargs": CHAT_TEMPLATE_KWARGS.schema(),
        "continue_message": FLAG,
        "continue_final_message": described("vLLM's name of `continue_message`", FLAG),
        "add_generation_prompt": described("false with `continue_message` only", FLAG),
        "plain_contents": FLAG,
    },
    required=("model", "messages"),
    accepted=ACCEPTED,
    refused={
        **NEUTRAL,
        "functions": (([],), "use `tools`"),
        "function_call": (("none",), "use `tools`"),
        "modalities": ((["text"],), "models give text only"),
        "audio": ((), "models take text and images, and give text"),
        "best_of": ((1,), "use `n`"),
        "echo": ((False,), "the prompt is in the request"),
        "add_special_tokens": ((False,), "the template has them"),
        "prompt": ((), "this is /v1/chat/completions: use `messages`"),
        "chat_template": ((), "the template is the model's own"),
    },
)
COMPLETION = Body(
    {
        **COMMON,
        **OF_COMPLETIONS,
        "prompt": described("absent or empty: the model's begin token, if it has one", PROMPT),
        "max_tokens": described(
            "0 with `echo` or `prompt_logprobs` only; -1: up to the context", integer(-1, MAX_COUNT)
        ),
        "echo": FLAG,
        "suffix": option("suffix"),
        "best_of": described(
            "computed completions; the `n` most likely are returned",
            integer(1, MAX_CHOICES),
        ),
        "logprobs": described("the number of alternatives", integer(0, MAX_TOP_LOGPROBS)),
    },
    required=("model",),
    accepted=ACCEPTED,
    refused={
        **NEUTRAL,
        "messages": ((), "this is /v1/completions: use `prompt`"),
        "tools": (([],), "use /v1/chat/completions"),
        "top_logprobs": ((), "here `logprobs` is the number of alternatives"),
        "add_special_tokens": ((True,), "send token ids as `prompt`"),
    },
)

# ---- models of texts -------------------------------------------------------------------------

INPUTS = listed(NAME, 1, MAX_INPUTS)
CUTS: Mapping[str, bool] = {"END": True, "NONE": False}  # values of clients -> `truncate`
VECTORS_ACCEPTED: Mapping[str, Schema] = dict.fromkeys(
    (
        "user",
        "metadata",
        "options",  # Ollama's, which its own /v1/embeddings ignores, like the next one
        "keep_alive",
        "ttl",
        "extra_body",
        "timeout",
        "max_retries",
        "api_key",
        "base_url",
    ),
    ANY,
)
NOTHING: RefusedFields = {}
VECTORS_REFUSED: RefusedFields = {
    "truncate_prompt_tokens": ((), "use `truncate`"),
    "priority": ((0,), "leave it out"),
    "add_special_tokens": ((True,), "leave it out"),
    "max_tokens_per_doc": ((), "use `truncate`"),
    "max_chunks_per_doc": ((), "use `truncate`"),
}


TRUNCATE: Schema = described("END is true, NONE false: Cohere's names", choice(True, False, *CUTS))


def _of_texts(
    required: tuple[str, ...], honoured: Mapping[str, Schema], refused: RefusedFields = NOTHING
) -> Body:
    all_fields = {"model": NAME, **honoured, "truncate": TRUNCATE}
    return Body(all_fields, ("model", *required), VECTORS_ACCEPTED, {**VECTORS_REFUSED, **refused})


EMBEDDINGS = _of_texts(
    ("input",),
    {
        "input": one_of(NAME, TOKEN_IDS, INPUTS, listed(TOKEN_IDS, 1, MAX_INPUTS)),
        "encoding_format": choice(*FORMATS),
        "dimensions": integer(1),
        "normalize": FLAG,
        "prompt_name": TEXT,
        "input_type": described("of the model's prompts that for this type, if it has one", TEXT),
    },
    {
        "embedding_types": ((["float"],), "use `encoding_format`"),
        "embedding_type": (("float",), "use `encoding_format`"),
        "output_dtype": (("float",), "use `encoding_format`"),
        "output_dimension": ((), "use `dimensions`"),
        "late_chunking": ((False,), "send each text by itself"),
    },
)
_DOCUMENT: Mapping[str, Any] = one_of(
    NAME, {"type": "object", "properties": {"text": NAME}, "required": ["text"]}
)
RERANK = _of_texts(
    ("query", "documents"),
    {
        "query": NAME,
        "documents": listed(_DOCUMENT, 1, MAX_INPUTS),
        "top_n": integer(1, MAX_TOP),
        "return_documents": FLAG,
        "instruction": TEXT,
    },
)
SCORE = _of_texts(
    ("text_1", "text_2"), {"text_1": one_of(NAME, INPUTS), "text_2": one_of(NAME, INPUTS)}
)
CLASSIFY = _of_texts(("input",), {"input": one_of(NAME, INPUTS)})

# ---- decisions -------------------------------------------------------------------------------

_CHOICE_TEXT: Schema = {
    "type": "string",
    "pattern": r"^[^\r\n]*\S[^\r\n]*$",
    "maxLength": MAX_CHOICE_CHARS,
}
QUESTION = Body(
    {
        "question": {"type": "string", "maxLength": MAX_QUESTION_CHARS},
        "choices": described(
            "labels to choose one from; without them and `scale`: yes or no",
            listed(_CHOICE_TEXT, 2, MAX_LABELS),
        ),
        "scale": described(
            "the least and the greatest of its whole numbers", listed(integer(0, MAX_SCALE), 2, 2)
        ),
    }
)
DECISIONS = Body(
    {
        "model": NAME,
        "prompt": {"type": "string", "pattern": r"\S"},
        "questions": listed(QUESTION.schema(), 1, MAX_QUESTIONS),
        "temperature": {
            "type": "number",
            "minimum": MIN_TEMPERATURE,
            "maximum": MAX_TEMPERATURE,
        },
    },
    ("model", "prompt", "questions"),
    VECTORS_ACCEPTED,
)
