"""The fields of requests of Ollama's interface, one table for each path.

The parsers check names against these tables, openapi.json is made from them, and docs/gateway.md
documents the same fields for users.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.options import MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import LEVELS, MAX_MESSAGES, MAX_TOOLS, ROLES
from mlxpool.gateway.description.schemas import (
    ANY,
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
from mlxpool.gateway.generation.pool_options import OF_OLLAMA

# field of `options` -> option of the pool
OPTIONS: Mapping[str, str] = {
    "num_predict": "max_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
            "num_keep",
            "num_ctx",
            "thinking_budget",
            "plain_contents",
        )
    },
}
# Ollama's options of loading and computation; here the pool's settings decide on them.
OPTIONS_IGNORED: Mapping[str, Schema] = dict.fromkeys(
    (
        "num_thread",
        "num_gpu",
        "num_batch",
        "num_gqa",
        "main_gpu",
        "use_mmap",
        "use_mlock",
        "numa",
        "low_vram",
        "f16_kv",
        "logits_all",
        "vocab_only",
        "embedding_only",
        "mirostat_tau",
        "mirostat_eta",  # both have no effect, as mirostat itself is refused
    ),
    ANY,
)
OPTIONS_REFUSED: RefusedFields = {
    "typical_p": ((1, 1.0), "leave it out"),
    "tfs_z": ((1, 1.0), "leave it out"),
    "mirostat": ((0,), "leave it out"),
    "penalize_newline": ((True,), "leave it out"),
}
# option that may have any negative value in Ollama -> the pool's value for a negative value
NEGATIVE: Mapping[str, int] = {
    "seed": -1,  # a random seed
    "top_k": 0,  # all tokens
    "num_predict": 0,  # up to the context
}
ANY_INTEGER: Schema = {"type": "integer"}
GENERATION_OPTIONS = Body(
    {name: ANY_INTEGER if name in NEGATIVE else option(target) for name, target in OPTIONS.items()},
    accepted=OPTIONS_IGNORED,
    refused=OPTIONS_REFUSED,
    open=True,
)
# A request for vectors: options of text generation have no effect.
VECTOR_OPTIONS = Body(
    {},
    accepted={**dict.fromkeys(OPTIONS, ANY), **OPTIONS_IGNORED},
    refused=OPTIONS_REFUSED,
    open=True,
)
# field of the request -> option of the pool
CONTEXT_POLICY: Mapping[str, str] = {"truncate": "truncate", "shift": "shift"}
KEEP_ALIVE = described(
    "how long the model stays loaded without work: seconds, or a duration such as 5m; 0: it is"
    " unloaded once it has no work; below 0: it stays",
    {"type": ["number", "string"]},
)
IMAGES = described("base64 of files", listed(TEXT))
MOST = "max"  # Ollama's level above the pool's levels; here it means the pool's highest level
THINK = choice(True, False, *LEVELS, MOST)
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": choice(*ROLES),
        "content": {"type": ["string", "array", "null"]},
        "thinking": {"type": ["string", "null"]},
        "tool_name": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": MAP},
        "images": {"type": ["array", "null"], "items": TEXT},
    },
    "required": ["role"],
}
_FUNCTION: Schema = {"type": "object", "properties": {"name": NAME}, "required": ["name"]}
TOOL = one_of(
    {"type": "object", "properties": {"function": _FUNCTION}, "required": ["function"]},
    _FUNCTION,
    other_tool("function"),
)
COMMON: Mapping[str, Schema] = {
    "model": described("a name of /api/tags", NAME),
    "stream": described("true if it is absent", FLAG),
    "options": GENERATION_OPTIONS.schema(),
    "think": THINK,
    "format": OF_OLLAMA,
    "logprobs": FLAG,
    "top_logprobs": described("with `logprobs` only", integer(0, MAX_TOP_LOGPROBS)),
    "keep_alive": KEEP_ALIVE,
    **{name: option(target) for name, target in CONTEXT_POLICY.items()},
}
REFUSED: RefusedFields = {
    "template": (("",), "the template is the model's own; with `raw` the prompt is taken as it is"),
}
GENERATE = Body(
    {
        **COMMON,
        "prompt": TEXT,
        "system": TEXT,
        "raw": FLAG,
        "suffix": option("suffix"),
        "images": IMAGES,
        "context": described(
            "deprecated: the `context` of an earlier answer", {**TOKEN_IDS, "minItems": 0}
        ),
    },
    required=("model",),
    refused=REFUSED,
    open=True,
)
CHAT = Body(
    {
        **COMMON,
        "messages": listed(MESSAGE, 0, MAX_MESSAGES),
        "tools": listed(TOOL, 0, MAX_TOOLS),
    },
    required=("model",),
    refused={**REFUSED, "images": (([],), "give them in a message: messages[n].images")},
    open=True,
)
EMBED = Body(
    {
        "model": NAME,
        "input": one_of(TEXT, listed(TEXT)),
        "truncate": described("true if it is absent", FLAG),
        "dimensions": integer(1),
        "options": VECTOR_OPTIONS.schema(),
        "keep_alive": KEEP_ALIVE,
    },
    required=("model",),
    open=True,
)
EMBEDDINGS = Body(
    {
        "model": NAME,
        "prompt": TEXT,
        "options": VECTOR_OPTIONS.schema(),
        "keep_alive": KEEP_ALIVE,
    },
    required=("model",),
    open=True,
)
NAMED: Mapping[str, Schema] = {"model": NAME, "name": described("the older form of `model`", NAME)}
SHOW = Body({**NAMED, "verbose": FLAG}, open=True)
PULL = Body(
    {**NAMED, "stream": described("true if it is absent", FLAG)}, (), {"insecure": ANY}, open=True
)

# field that would change the answer -> its place or name in this interface
IN_OPTIONS = {
    **{name: f"options.{name}" for name in OPTIONS},
    "max_tokens": "options.num_predict",
    "max_completion_tokens": "options.num_predict",
    "response_format": "format",
    "reasoning_effort": "think",
}
BESIDE_OPTIONS = {name: name for name in COMMON if name != "options"}
