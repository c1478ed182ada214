"""Digests of submissions: equal requests have equal digests."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.jobs.canonical import canonical, job_digest
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept.job_work import parse_work

BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": None}}}],
    "options": {"temperature": 1.0, "max_tokens": 5, "logit_bias": {"3": 1, "1": 2.0}},
}


def digest(body: dict[str, Any]) -> bytes:
    return job_digest(Generate.parse(body, ()))


def test_neither_order_nor_spelling_makes_another_request() -> None:
    tool = {"function": {"parameters": {"a": 1.0}, "name": "f"}, "type": "function"}
    options = {"logit_bias": {"1": 2, "3": 1.0}, "num_predict": 5, "temperature": 1}
    same = {"tools": [tool], "options": options, "messages": BODY["messages"], "model": "m"}
    assert digest(same) == digest(BODY)
    assert digest({**BODY, "deadline_ms": 5, "session": "s"}) == digest(BODY)
    assert digest({**BODY, "options": {**BODY["options"], "top_p": 0.9}}) == digest(BODY)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"messages": [{"role": "user", "content": "hello "}]},
        {"tools": None},
        {"think": True},
        {"options": {"max_tokens": 6}},
        {"options": {**BODY["options"], "seed": 1}},
    ],
)
def test_what_changes_the_answer_makes_another_request(changed: dict[str, Any]) -> None:
    assert digest({**BODY, **changed}) != digest(BODY)


EMBED: dict[str, Any] = {"kind": "embed", "model": "m", "inputs": ["a"]}
DECIDE: dict[str, Any] = {"kind": "decide", "model": "m", "prompt": "a", "questions": [{}]}


def call_digest(body: dict[str, Any]) -> bytes:
    return job_digest(parse_work(body, ()))


@pytest.mark.parametrize(
    ("body", "same"),
    [
        (EMBED, {"truncate": False, "prompt_name": "", "dimensions": None, "prompt": None}),
        (EMBED, {"deadline_ms": 5}),
        (DECIDE, {"temperature": 1}),
        (DECIDE, {"temperature": 1.0}),
    ],
)
def test_a_call_that_names_its_defaults_is_the_same_request(
    body: dict[str, Any], same: dict[str, Any]
) -> None:
    assert call_digest({**body, **same}) == call_digest(body)


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (EMBED, {"truncate": True}),
        (EMBED, {"inputs": ["b"]}),
        (EMBED, {"prompt": ""}),  # an empty prompt, in place of the model's own
        (EMBED, {"normalise": False}),
        (DECIDE, {"temperature": 0.5}),
    ],
)
def test_what_changes_the_answer_makes_another_call(
    body: dict[str, Any], changed: dict[str, Any]
) -> None:
    assert call_digest({**body, **changed}) != call_digest(body)


def test_values_of_other_types_stay_apart() -> None:
    assert canonical({"a": True}) == [["a", True]] and canonical(1.5) == 1.5
    assert canonical([1.0, "1", None]) == [1, "1", None]


@pytest.mark.parametrize("number", [1e300, 2.0**64, -1e20, float("inf")])
def test_a_number_too_large_for_an_integer_on_the_wire_has_a_digest(number: float) -> None:
    schema = {"type": "number", "maximum": number}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert digest({**BODY, "tools": [tool]}) != digest(BODY)
