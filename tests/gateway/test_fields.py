"""Bodies of requests: whatever comes is taken or refused by name; nothing is dropped in silence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.gateway.errors import Fault
from mlxpool.gateway.ollama import fields
from mlxpool.gateway.openai import fields as openai_fields

HI = [{"role": "user", "content": "hi"}]
Read = Callable[[Mapping[str, Any]], Any]
READERS: dict[str, tuple[Read, dict[str, Any]]] = {
    "chat": (openai_fields.chat, {"model": "m", "messages": HI}),
    "completion": (openai_fields.completion, {"model": "m", "prompt": "x"}),
    "ollama_chat": (fields.chat, {"model": "m", "messages": HI}),
    "ollama_generate": (fields.generate, {"model": "m", "prompt": "x"}),
}
NAMES = sorted(
    {
        *openai_fields.CHAT,
        *openai_fields.COMPLETION_REFUSED,
        *openai_fields.CHAT_REFUSED,
        *openai_fields.SAMPLING,
        *fields.GENERATE,
        *fields.CHAT,
        *fields.GENERATE_REFUSED,
    }
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "function", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("reader", READERS)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=4))
def test_any_body_is_taken_or_refused(reader: str, change: dict[str, Any]) -> None:
    read, base = READERS[reader]
    try:
        asked = read({**base, **change})
    except Fault as fault:
        assert fault.status == 400 and fault.message and not fault.retry
    else:
        other = {"logprobs", "tools", "think", "session"}
        Options.parse({k: v for k, v in asked.options.items() if k not in other})


@pytest.mark.parametrize("reader", READERS)
@given(st.text(min_size=1).filter(lambda name: name not in {*NAMES, *openai_fields.ACCEPTED}))
def test_an_unknown_field_is_named(reader: str, name: str) -> None:
    read, base = READERS[reader]
    with pytest.raises(Fault) as caught:
        read({**base, name: 1})
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_what_openai_means_by_nothing() -> None:
    asked = openai_fields.chat({"model": "m", "messages": HI})
    assert asked.options == dict(openai_fields.DEFAULTS)
    assert (asked.choices, asked.stream, asked.logprobs) == (1, False, False)
    most = openai_fields.completion({"model": "m", "prompt": "x"}).options["max_tokens"]
    assert most == openai_fields.COMPLETION_TOKENS


def test_what_ollama_means_by_nothing_is_what_the_pool_means() -> None:
    asked = fields.chat({"model": "m", "messages": HI})
    assert (asked.options, asked.stream, asked.think) == ({}, True, None)


def test_each_choice_of_each_prompt_has_its_own_seed() -> None:
    body = {"model": "m", "prompt": ["a", [1, 2]], "n": 2, "seed": 5}
    every = openai_fields.completion(body).arguments()
    assert [(one.get("prompt"), one.get("tokens"), one["seed"]) for one in every] == [
        ("a", None, 5),
        ("a", None, 6),
        (None, [1, 2], 5),
        (None, [1, 2], 6),
    ]


def test_the_largest_seed_has_no_next() -> None:
    body = {"model": "m", "prompt": "a", "seed": 2**64 - 1}
    assert openai_fields.completion(body).arguments()[0]["seed"] == 2**64 - 1
    with pytest.raises(Fault, match="seed"):
        openai_fields.completion({**body, "n": 2})
