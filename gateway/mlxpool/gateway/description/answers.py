"""JSON schemas of the gateway's answers, for openapi.json; tests compare real answers with them.

The names are those of components in the document. Answers may have further members.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.gateway.description.block_answers import ANTHROPIC, RESPONSES
from mlxpool.gateway.description.schemas import (
    COUNT,
    FLAG,
    MAP,
    MAP_OR_NULL,
    NULL,
    NUMBER,
    TEXT,
    TEXT_OR_NULL,
    Schema,
    choice,
    listed,
    one_of,
    record,
    ref,
)

# ---- OpenAI's interface ----------------------------------------------------------------------

_USAGE = record(
    {"prompt_tokens": COUNT, "total_tokens": COUNT},
    {
        "completion_tokens": COUNT,
        "prompt_tokens_details": record({"cached_tokens": COUNT}),
    },
)
_FINISH = choice("stop", "length", "tool_calls", None)
_HEAD: Mapping[str, Schema] = {"id": TEXT, "created": COUNT, "model": TEXT}
_TOOL_CALL = record({"function": MAP}, {"id": TEXT, "type": TEXT, "index": COUNT})
_DELTA = record(
    {},
    {
        "role": TEXT,
        "content": TEXT,
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "tool_calls": listed(_TOOL_CALL),
    },
)
_MESSAGE = record(
    {"role": {"const": "assistant"}, "content": TEXT_OR_NULL},
    {
        "reasoning_content": TEXT,
        "reasoning": TEXT,
        "tool_calls": listed(_TOOL_CALL),
        "refusal": NULL,
    },
)
_CHOICE: Mapping[str, Schema] = {
    "index": COUNT,
    "logprobs": MAP_OR_NULL,
    "finish_reason": _FINISH,
}
_LIST: Mapping[str, Schema] = {"object": {"const": "list"}, "model": TEXT, "usage": ref("Usage")}

# Members for Anthropic's clients in the list of models; the clients of both interfaces read it.
_OF_ANTHROPIC: Mapping[str, Schema] = {
    "type": {"const": "model"},
    "display_name": TEXT,
    "created_at": {"type": "string", "format": "date-time"},
    "max_input_tokens": {"type": ["integer", "null"]},
}
_NUMBER_OR_NULL: Schema = {"type": ["number", "null"]}
OPENAI: Mapping[str, Schema] = {
    **RESPONSES,
    "Job": record(
        {
            **dict.fromkeys(("id", "key", "kind", "model", "state"), TEXT),
            "object": {"const": "job"},
        },
        {
            **dict.fromkeys(("seq", "gen", "ids", "attempts", "end_seq", "bytes", "line"), COUNT),
            **dict.fromkeys(("deadline", "ended", "forget"), _NUMBER_OR_NULL),
            "custom_id": TEXT,
            **dict.fromkeys(("priority", "submitted", "due"), NUMBER),
            "cause": TEXT,
            "notice": TEXT,
            "batch": TEXT,
            "damaged": TEXT,
            "retried": listed(listed(COUNT)),
            "failures": listed(MAP),
        },
    ),
    "JobList": record({"object": {"const": "list"}, "data": listed(ref("Job")), "next": COUNT}),
    "JobEvent": record(
        {},
        {
            "pos": COUNT,
            "text": TEXT,
            "ids": listed(COUNT),
            "logprobs": listed(MAP),
            "gen": COUNT,
            "reason": TEXT,
            "usage": MAP,
            "seed": COUNT,
            "complete": FLAG,
            "code": TEXT,
            "message": TEXT,
            "rows": COUNT,
            "columns": COUNT,
            "vectors": listed(listed(NUMBER)),
            "labels": listed(TEXT),
            "decisions": listed(MAP),
        },
    ),
    "Deleted": record({"id": TEXT, "object": TEXT, "deleted": FLAG}),
    "Usage": _USAGE,
    "Error": record(
        {
            "error": record(
                {"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT},
                {"request_id": TEXT},
            )
        },
        {"load_progress": NUMBER},
    ),
    "Model": record(
        {
            "id": TEXT,
            "object": {"const": "model"},
            "created": COUNT,
            "owned_by": TEXT,
            "max_model_len": {"type": ["integer", "null"]},
            "state": TEXT_OR_NULL,
            **_OF_ANTHROPIC,
        }
    ),
    "ModelList": record(
        {
            "object": {"const": "list"},
            "data": listed(ref("Model")),
            "has_more": {"const": False},
            "first_id": TEXT_OR_NULL,
            "last_id": TEXT_OR_NULL,
        }
    ),
    "ChatCompletion": record(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": listed(record({**_CHOICE, "message": _MESSAGE})),
            "usage": ref("Usage"),
        }
    ),
    "ChatCompletionChunk": record(
        {
            **_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": listed(record({**_CHOICE, "delta": _DELTA})),
        },
        {"usage": one_of(ref("Usage"), NULL)},
    ),
    "Completion": record(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": listed(record({**_CHOICE, "text": TEXT})),
        },
        {"usage": one_of(ref("Usage"), NULL)},
    ),
    "Embeddings": record(
        {
            **_LIST,
            "data": listed(
                record(
                    {
                        "object": {"const": "embedding"},
                        "index": COUNT,
                        "embedding": one_of(listed(NUMBER), TEXT),
                    }
                )
            ),
        }
    ),
    "Ranking": record(
        {
            "id": TEXT,
            "model": TEXT,
            "usage": ref("Usage"),
            "results": listed(
                record(
                    {"index": COUNT, "relevance_score": NUMBER},
                    {"document": record({"text": TEXT})},
                )
            ),
        }
    ),
    "Scores": record(
        {**_LIST, "id": TEXT, "data": listed(record({"index": COUNT, "score": NUMBER}))}
    ),
    "Classes": record(
        {
            **_LIST,
            "id": TEXT,
            "labels": listed(TEXT),
            "data": listed(
                record(
                    {
                        "index": COUNT,
                        "label": TEXT,
                        "probs": listed(NUMBER),
                        "num_classes": COUNT,
                    }
                )
            ),
        }
    ),
    "Tokens": record(
        {
            "count": COUNT,
            "max_model_len": {"type": ["integer", "null"]},
            "tokens": listed(COUNT),
            "token_strs": one_of(listed(TEXT), NULL),
        }
    ),
    "TokenText": record({"prompt": TEXT}),
    "Decisions": record(
        {
            **_LIST,
            "id": TEXT,
            "data": listed(
                record(
                    {
                        "object": {"const": "decision"},
                        "index": COUNT,
                        "answer": {"type": ["boolean", "integer", "string"]},
                        "probabilities": {"type": "object", "additionalProperties": NUMBER},
                        "outside": NUMBER,
                    },
                    {"expected": NUMBER},
                )
            ),
        }
    ),
}  # fmt: skip

# ---- Ollama's interface ----------------------------------------------------------------------

_TIME: Schema = {"type": "string", "format": "date-time"}
_END: Mapping[str, Schema] = {
    "done_reason": TEXT,
    "total_duration": COUNT,
    "load_duration": COUNT,
    "prompt_eval_count": COUNT,
    "prompt_eval_duration": COUNT,
    "eval_count": COUNT,
    "eval_duration": COUNT,
    "logprobs": listed(MAP),
}
_DETAILS = record(
    {
        "parent_model": TEXT,
        "format": TEXT,
        "family": TEXT,
        "families": listed(TEXT),
        "parameter_size": TEXT,
        "quantization_level": TEXT,
    }
)
_TAG: Mapping[str, Schema] = {
    "name": TEXT,
    "model": TEXT,
    "size": COUNT,
    "digest": TEXT,
    "details": _DETAILS,
}
OLLAMA: Mapping[str, Schema] = {
    "OllamaError": record({"error": TEXT}, {"load_progress": NUMBER}),
    "OllamaGenerated": record(
        {"model": TEXT, "created_at": _TIME, "response": TEXT, "done": FLAG},
        {**_END, "thinking": TEXT, "context": listed(COUNT)},
    ),
    "OllamaChat": record(
        {
            "model": TEXT,
            "created_at": _TIME,
            "message": record(
                {"role": TEXT, "content": TEXT},
                {"thinking": TEXT, "tool_calls": listed(_TOOL_CALL)},
            ),
            "done": FLAG,
        },
        _END,
    ),
    "OllamaEmbed": record(
        {"model": TEXT, "embeddings": listed(listed(NUMBER))},
        {"total_duration": COUNT, "load_duration": COUNT, "prompt_eval_count": COUNT},
    ),
    "OllamaEmbedding": record({"embedding": listed(NUMBER)}),
    "OllamaTags": record({"models": listed(record({**_TAG, "modified_at": _TIME}))}),
    "OllamaRunning": record(
        {
            "models": listed(
                record({**_TAG, "expires_at": _TIME, "size_vram": COUNT, "context_length": COUNT})
            )
        }
    ),
    "OllamaShow": record(
        {
            "details": _DETAILS,
            "model_info": MAP,
            "capabilities": listed(TEXT),
            "modified_at": _TIME,
            "template": TEXT,
            "modelfile": TEXT,
            "parameters": TEXT,
            "license": TEXT,
        }
    ),
    "OllamaVersion": record({"version": TEXT}),
    "OllamaStatus": record({"status": TEXT}, {"digest": TEXT, "total": COUNT, "completed": COUNT}),
}

# ---- operations ------------------------------------------------------------------------------

OPERATIONS: Mapping[str, Schema] = {
    "Health": record({"status": choice("ok", "draining")}),
    "Document": MAP,
}
COMPONENTS: Mapping[str, Schema] = {**OPENAI, **ANTHROPIC, **OLLAMA, **OPERATIONS}
