"""The client's messages of `decide`, and its reading of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.client.decisions import Decision, DecisionList, decide, joined
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import ModelCall

USAGE = {"prompt_tokens": 3, "total_tokens": 3}


def answer(*rows: tuple[list[float], float]) -> Message:
    decisions = [{"probabilities": shares, "outside": outside} for shares, outside in rows]
    return Message(Header("decisions"), {"decisions": decisions, "usage": USAGE})


def read(call: Any, *rows: tuple[list[float], float]) -> DecisionList:
    decisions = call.answer(answer(*rows))
    assert isinstance(decisions, DecisionList), decisions
    return decisions


def fields_of(call: Any) -> dict[str, Any]:
    assert isinstance(call.content, ModelCall)
    return dict(call.content.fields)


def test_each_kind_of_question_is_sent_and_read() -> None:
    asked: list[Any] = ["sure?", ("which?", ["a", "b"]), ("", None), ("how?", range(2, 5))]
    (call,) = decide("m", "a text", asked, temperature=2, deadline_ms=5)
    assert fields_of(call) == {
        "prompt": "a text",
        "temperature": 2,
        "questions": [
            {"question": "sure?"},
            {"question": "which?", "choices": ["a", "b"]},
            {},
            {"question": "how?", "scale": [2, 4]},
        ],
    }
    assert (call.content.body() or {})["deadline_ms"] == 5
    rows = ([0.9, 0.1], 0.2), ([0.4, 0.6], 0.0), ([0.5, 0.5], 1.0), ([0.2, 0.5, 0.3], 0.0)
    decisions = read(call, *rows)
    assert decisions.usage == USAGE
    assert [decision.answer for decision in decisions] == [True, "b", True, 3]
    assert decisions[0].probabilities == {True: 0.9, False: 0.1} and decisions[0].outside == 0.2
    assert decisions[1].probability == 0.6
    assert decisions[0].expected == 0.9 and decisions[3].expected == pytest.approx(3.1)
    with pytest.raises(TypeError, match="texts have no mean"):
        _ = decisions[1].expected


def test_many_questions_are_several_calls_that_count_on() -> None:
    calls = decide("m", "x", [str(n) for n in range(130)])
    assert [len(fields_of(call)["questions"]) for call in calls] == [64, 64, 2]
    assert [fields_of(call).get("first") for call in calls] == [None, 64, 128]
    assert len({call.id for call in calls}) == 3
    parts = [
        read(call, *[([1.0, 0.0], 0.0)] * size)
        for call, size in zip(calls, (64, 64, 2), strict=True)
    ]
    whole = joined(parts)
    assert len(whole) == 130 and whole.usage == {key: 9 for key in USAGE}


def test_a_long_text_is_a_blob() -> None:
    (call,) = decide("m", "é" * 200_000, ["?"])
    assert fields_of(call)["prompt"] is True
    assert call.content.blobs() == (("é" * 200_000).encode(),)


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ([], "questions is empty"),
        ("why?", r"questions must be a list, got 'why\?'"),
        ([3], r"questions\[0\] must be a question, or \(question, choices\), got 3"),
        (["a", ("b",)], r"questions\[1\] must be a question, or"),
        ([("a", "xyz")], r"questions\[0\] must have a list of texts or a range, got 'xyz'"),
        ([("a", 5)], "a list of texts or a range, got 5"),
        ([("a", range(1, 10, 2))], r"has range\(1, 10, 2\), must be a range of 2 numbers or more"),
        ([("a", range(4, 5))], "a range of 2 numbers or more"),
        ([("a", range(-3, 5))], "from 0 to 1000"),
        ([*["a"] * 70, ("b", ["x"])], r"questions\[70\].choices must be a list of 2 to 26"),
    ],
)
def test_what_cannot_be_sent_is_named(questions: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        decide("m", "x", questions)


def test_prompts_that_cannot_be_sent() -> None:
    wrong: Any = 3
    with pytest.raises(BadRequest, match="prompt must be a str, got 3"):
        decide("m", wrong, ["?"])
    with pytest.raises(BadRequest, match="prompt is not Unicode"):
        decide("m", "\ud800", ["?"])


def test_an_answer_to_other_questions_is_an_error() -> None:
    (call,) = decide("m", "x", ["a", "b"])
    error = call.answer(answer(([1.0, 0.0], 0.0)))
    assert not isinstance(error, list) and "cannot be read" in str(error)


def test_the_first_of_equal_labels_is_the_answer() -> None:
    (call,) = decide("m", "x", [("a", ["p", "q"])])
    (decision,) = read(call, ([0.5, 0.5], 0.1))
    assert decision == Decision("p", {"p": 0.5, "q": 0.5}, 0.1)
