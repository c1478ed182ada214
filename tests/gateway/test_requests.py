"""Checks of request bodies: every field is honoured, accepted or refused; none is ignored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.field_checks import ABOUT_REQUEST
from mlxpool.gateway.generation import pool_options
from mlxpool.gateway.ollama import fields as ollama_fields
from mlxpool.gateway.ollama import requests as ollama_requests
from mlxpool.gateway.openai import requests as openai_requests
from mlxpool.gateway.openai import vectors as openai_vectors
from support.gateway_parsers import CHAT, GENERATE, OLLAMA, PARSERS, TEXT
from support.openapi_answers import validator as validator_of

ASKED = (CHAT, TEXT, OLLAMA, GENERATE)
KNOWN = {*ollama_fields.IN_OPTIONS}.union(*(PARSERS[path].fields.names for path in ASKED))
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


@pytest.mark.parametrize("path", PARSERS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_body_is_taken_or_a_field_is_named(path: str, data: st.DataObject) -> None:
    parse = PARSERS[path]
    names = st.sampled_from(sorted(parse.fields.names)) | st.text(max_size=6)
    change = data.draw(
        st.dictionaries(names, VALUES | ITEMS | st.lists(ITEMS, max_size=3), max_size=3)
    )
    try:
        request = parse(**change)
    except HttpError as error:
        assert error.status == 400 and error.message and not error.retry
    else:
        if path in ASKED:
            other = {"logprobs", "tools", "think", "session"}
            Options.parse({k: v for k, v in request.options.items() if k not in other})


@pytest.mark.parametrize("path", ASKED)
@given(
    st.text(min_size=1).filter(lambda name: name not in KNOWN and not ABOUT_REQUEST.fullmatch(name))
)
def test_an_unknown_field_is_named(path: str, name: str) -> None:
    """The error names an unknown field.

    Ollama ignores unknown fields, so its interface accepts such a field and only reports it.
    """
    if path in (OLLAMA, GENERATE):
        assert PARSERS[path](**{name: 1}).unknown == [name]
        return
    with pytest.raises(HttpError) as caught:
        PARSERS[path](**{name: 1})
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


@pytest.mark.parametrize("path", [GENERATE, OLLAMA])
def test_ollamas_fields_at_the_wrong_level_are_refused_with_their_place(path: str) -> None:
    for name, place in ollama_fields.IN_OPTIONS.items():
        with pytest.raises(HttpError, match=f"'{name}'; did you mean '{place}'"):
            PARSERS[path](**{name: 1})
    for name in ("truncate", "shift", "think", "logprobs"):
        with pytest.raises(HttpError, match=f"'options.{name}'; did you mean '{name}'"):
            PARSERS[path](options={name: True})


def test_absent_fields_have_openais_defaults() -> None:
    request = PARSERS[CHAT]()
    assert request.options == dict(pool_options.DEFAULTS)
    assert (request.choices, request.stream, request.logprobs) == (1, False, False)
    max_tokens = PARSERS[TEXT]().options["max_tokens"]
    assert max_tokens == openai_requests.DEFAULT_MAX_TOKENS


def test_absent_fields_of_ollama_leave_the_pools_defaults() -> None:
    request = PARSERS[OLLAMA]()
    assert (request.options, request.stream, request.think) == ({}, True, None)


def test_each_prompt_is_asked_for_with_all_its_choices() -> None:
    body = {"model": "m", "prompt": ["a", [1, 2]], "n": 2, "seed": 5}
    request = openai_requests.completion(body)
    assert [(a.get("prompt"), a.get("tokens"), a["seed"]) for a in request.arguments()] == [
        ("a", None, 5),
        (None, [1, 2], 5),
    ]
    assert (request.choices, request.candidates) == (2, 2)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"n": 65}, "n", "from 1 to 64"),
        ({"n": 3, "best_of": 2}, "best_of", "'best_of' is 2, must be at least 'n', 3"),
        ({"best_of": 65}, "best_of", "from 1 to 64"),
        ({"best_of": 2, "stream": True}, "best_of", "the best are known at the end"),
        ({"prompt": ["a", "b", "c"], "best_of": 22}, "n", "3 prompts with 22 choices"),
        ({"max_tokens": 0}, "max_tokens", "at least 1|from 1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "combined with 'stream'"),
    ],
)
def test_choices_that_cannot_be_had_are_refused(
    change: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(HttpError, match=words) as caught:
        openai_requests.completion({"model": "m", "prompt": "a", **change})
    assert caught.value.param == param


def test_best_of_asks_for_log_probabilities_that_are_not_shown() -> None:
    body = {"model": "m", "prompt": "a", "n": 2, "best_of": 4, "echo": True, "max_tokens": 0}
    request = openai_requests.completion(body)
    assert (request.choices, request.candidates, request.logprobs) == (2, 4, False)
    assert request.options["logprobs"] and not request.prompt_logprobs
    assert Options.parse(request.options).prompt_alternatives == -1
    same = openai_requests.completion({**body, "best_of": 2, "stream": True, "logprobs": 3})
    assert same.logprobs and Options.parse(same.options).prompt_alternatives == 3


def test_the_largest_seed_allows_one_choice_only() -> None:
    body = {"model": "m", "prompt": "a", "seed": 2**64 - 1}
    assert openai_requests.completion(body).arguments()[0]["seed"] == 2**64 - 1
    with pytest.raises(HttpError, match="seed"):
        openai_requests.completion({**body, "n": 2})


def test_the_texts_of_a_score_are_one_or_as_many() -> None:
    body = {"model": "m", "text_1": ["a", "b"]}
    with pytest.raises(HttpError, match=r"'text_1' has 2 texts, must have 1$"):
        openai_vectors.score({**body, "text_2": "c"})
    with pytest.raises(
        HttpError, match=r"'text_1' has 2 texts, must have 1, or 3 as 'text_2' has$"
    ):
        openai_vectors.score({**body, "text_2": ["c", "d", "e"]})


def test_the_model_bounds_the_dimensions() -> None:
    body = {"model": "m", "input": "a"}
    assert openai_vectors.embeddings({**body, "dimensions": 2**31}).settings["dimensions"] == 2**31
    assert ollama_requests.embed({**body, "dimensions": 2**31}).dimensions == 2**31
    for parse in (openai_vectors.embeddings, ollama_requests.embed):
        with pytest.raises(HttpError, match=r"'dimensions' is 0, must be at least 1$"):
            parse({**body, "dimensions": 0})


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"seed": -5}, {"seed": -1}),
        ({"seed": -1, "top_k": -1}, {"seed": -1, "top_k": 0}),
        ({"seed": 0, "top_k": 0}, {"seed": 0, "top_k": 0}),
        ({"top_k": -40}, {"top_k": 0}),
    ],
)
def test_negative_options_are_taken_as_ollama_does(
    given: dict[str, int], taken: dict[str, int]
) -> None:
    request = ollama_requests.generate({"model": "m", "prompt": "x", "options": given})
    assert request.options == taken
    assert validator_of(ollama_fields.GENERATE.schema()).is_valid({"model": "m", "options": given})
    with pytest.raises(HttpError, match=r"options\.seed"):
        ollama_requests.generate({"model": "m", "options": {"seed": -5.5}})
