"""Whatever a body holds, a parser takes it or names a field: it never fails otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.anthropic.requests import MESSAGES
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.openai import token_routes as tokens
from mlxpool.gateway.openai.responses_api import requests as responses_api
from mlxpool.gateway.openai.responses_api.fields import RESPONSE
from mlxpool.gateway.openai.token_routes import TOKENIZE

HI = [{"role": "user", "content": "hi"}]
PARSERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], Body, dict[str, Any]]] = {
    "responses": (responses_api.response, RESPONSE, {"model": "m", "input": "x"}),
    "messages": (anthropic.message, MESSAGES, {"model": "m", "messages": HI, "max_tokens": 5}),
    "tokenize": (tokens.tokenize, TOKENIZE, {"model": "m", "messages": HI}),
}
_KEYS = """
    arguments call_id content data detail effort encrypted_content file_id format function id
    image_url input input_schema is_error media_type mode name output parameters role schema
    source strict summary text thinking tool_use_id tools type url
"""
_WORDS = """
    allowed_tools any assistant base64 custom enabled function function_call function_call_output
    image image/png input_image input_text json_schema message output_text reasoning refusal
    required system text thinking tool tool_result tool_use user {}
"""
KEYS, WORDS = _KEYS.split(), _WORDS.split()
LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(WORDS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=12,
)
# A map that looks like an item, a block, a tool or a choice.
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(WORDS)},
    optional={key: VALUES for key in KEYS if key != "type"},
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=100)
@given(data=st.data())
def test_a_body_is_taken_or_a_field_is_named(name: str, data: st.DataObject) -> None:
    parse, body, base = PARSERS[name]
    field = data.draw(st.sampled_from(sorted(body.honoured)))
    value = data.draw(VALUES | ITEMS | st.lists(ITEMS, max_size=3))
    try:
        parse({**base, field: value})
    except HttpError as error:
        assert error.status == 400 and error.message
