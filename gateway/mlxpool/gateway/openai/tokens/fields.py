"""The fields of requests for token ids and for texts of token ids."""

from __future__ import annotations

from mlxpool.common.protocol.chat import MAX_MESSAGES, MAX_TOOLS
from mlxpool.gateway.description.schemas import FLAG, NAME, TEXT, TOKEN_IDS, described, listed
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.openai.fields import CHAT_TEMPLATE_KWARGS, MESSAGE, TOOL

TOKENIZE = Body(
    {
        "model": described("a name of /v1/models", NAME),
        "prompt": TEXT,
        "messages": listed(MESSAGE, 1, MAX_MESSAGES),
        "tools": listed(TOOL, 0, MAX_TOOLS),
        "add_special_tokens": described("of `prompt`; true if it is absent", FLAG),
        "return_token_strs": FLAG,
        "chat_template_kwargs": CHAT_TEMPLATE_KWARGS.schema(),
    },
    required=("model",),
    refused={
        "add_generation_prompt": ((True,), "leave it out"),
        "continue_final_message": ((False,), "leave it out"),
        "chat_template": ((), "the template is the model's own"),
        "mm_processor_kwargs": ((), "leave it out"),
    },
)
DETOKENIZE = Body({"model": NAME, "tokens": {**TOKEN_IDS, "minItems": 0}}, ("model", "tokens"))
