"""A worker's view of `decide`: valid bodies, and errors that name the faulty key."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.decisions import (
    MAX_CHOICES,
    MAX_QUESTION_CHARS,
    MAX_QUESTIONS,
    DecideCall,
    Question,
)

GOOD: dict[str, Any] = {"model": "m", "prompt": "a text", "questions": [{"question": "why?"}]}


def refused(body: dict[str, Any], *blobs: bytes) -> str:
    with pytest.raises(BadRequest) as failed:
        DecideCall.parse(body, blobs)
    return failed.value.message


def test_each_kind_of_question_has_its_labels() -> None:
    asked = [{"question": " sure? "}, {"choices": [" a", "b"]}, {"question": "n?", "scale": [1, 3]}]
    call = DecideCall.parse({**GOOD, "questions": asked, "temperature": 2, "owner": "me"}, ())
    assert call.questions == (
        Question("sure?"),
        Question(choices=("a", "b")),
        Question("n?", scale=(1, 3)),
    )
    assert [question.labels for question in call.questions] == [
        ("yes", "no"),
        ("a", "b"),
        ("1", "2", "3"),
    ]
    assert (call.temperature, call.owner, call.alone, call.size) == (
        2.0,
        "me",
        False,
        6 + 5 + 2 + 2,
    )
    again = [question.body() for question in call.questions]
    assert DecideCall.parse({**GOOD, "questions": again}, ()).questions == call.questions


def test_a_long_text_comes_as_a_blob() -> None:
    assert DecideCall.parse({**GOOD, "prompt": True}, ["é".encode()]).prompt == "é"
    assert "has no blob" in refused({**GOOD, "prompt": True})
    assert "not UTF-8" in refused({**GOOD, "prompt": True}, b"\xff")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": " "}, "prompt must be a text that is not empty, got ' '"),
        ({"prompt": 3}, "prompt must be a text"),
        ({"questions": []}, f"a list of 1 to {MAX_QUESTIONS} maps, got 0"),
        ({"questions": [{}] * 65}, f"a list of 1 to {MAX_QUESTIONS} maps, got 65"),
        ({"questions": "why?"}, "got 'why?'"),
        ({"questions": [{}, "x"]}, "questions[1] must be a map, got 'x'"),
        (
            {"questions": [{"question": "x" * (MAX_QUESTION_CHARS + 1)}]},
            "4096 characters, got 4097",
        ),
        ({"questions": [{"question": 1}]}, "questions[0].question must be a text"),
        ({"questions": [{}, {"choice": ["a"]}]}, "'choice'; did you mean 'choices'?"),
        ({"questions": [{"choices": ["a", "b"], "scale": [1, 2]}]}, "got both"),
        ({"questions": [{"choices": ["a"]}]}, f"2 to {MAX_CHOICES} texts, got 1"),
        ({"questions": [{"choices": [str(n) for n in range(27)]}]}, "texts, got 27"),
        ({"questions": [{"choices": ["a", " "]}]}, "questions[0].choices[1] must be a text of 1"),
        ({"questions": [{"choices": ["a", "b" * 257]}]}, "must be a text of 1 to 256 characters"),
        ({"questions": [{"choices": ["a", "b\nc"]}]}, "choices[1] must be one line"),
        ({"questions": [{"choices": ["a", "b", "a "]}]}, "[2] is 'a', as questions[0].choices[0]"),
        ({"questions": [{"scale": [3, 3]}]}, "the least and the greatest of its numbers"),
        ({"questions": [{"scale": [-1, 3]}]}, "from 0 to 1000, got [-1, 3]"),
        ({"questions": [{"scale": [True, 3]}]}, "got [True, 3]"),
        ({"questions": [{"scale": [0, 101]}]}, "has 102 numbers, at most 101"),
        ({"temperature": 0}, "temperature must be from 0.05 to 100.0, got 0"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"first": -1}, "first must be an integer from 0"),
        ({"promt": "x"}, "decide has no key 'promt'; did you mean 'prompt'?"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], said: str) -> None:
    assert said in refused({**GOOD, **change})


def test_questions_are_counted_from_the_first_of_a_divided_request() -> None:
    assert "questions[129].choices" in refused(
        {**GOOD, "first": 128, "questions": [{}, {"choices": []}]}
    )
