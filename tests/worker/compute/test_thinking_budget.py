"""Tests the token bound of thoughts: the thoughts, the end mark, then a normal answer.

The demo model has no thoughts. Here its answers begin as thoughts, which it never ends by itself.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.constrained_answers import Answer, Answers, demo, end_of_thoughts

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.constraints.thought_bound import NEAR  # noqa: E402
from mlxpool.worker.speculation.ngram import NgramDrafter  # noqa: E402
from mlxpool.worker.speculation.speculator import Speculator  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["number"],
    "additionalProperties": False,
}
# The options of each row: a far and a near bound, no bound, a bound with a format, other options.
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, "thinking_budget": 40},
    {"temperature": 0.8, "thinking_budget": 3},
    {"temperature": 0.9},
    {"temperature": 0.0, "thinking_budget": 0},
    {"temperature": 0.7, "thinking_budget": 9, "logprobs": True, "top_logprobs": 2},
    {
        "temperature": 0.7,
        "thinking_budget": 5,
        "format": {"type": "json_schema", "schema": SCHEMA},
    },
    {"temperature": 0.8, "thinking_budget": NEAR + 1, "repeat_penalty": 1.7, "repeat_last_n": 6},
]
WAYS = [("slabs", False), ("rows", False), ("pool", True)]
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


def answers(
    loaded: LoadedModel, layout: str = "slabs", *, ahead: bool = False, speculates: bool = False
) -> Answers:
    engine = model_engine(
        loaded,
        demo()[1],
        context=512,
        prefix="off",
        lookahead=ahead,
        layout=layout,
        blocks=96,
    )
    speculator = None
    if speculates:
        speculator = Speculator(NgramDrafter(), engine.cost.seconds, lambda: 0.0, ahead=ahead)
    return Answers(engine, speculator)


def run(batch: Answers, requests: list[dict[str, Any]]) -> list[Answer]:
    for number, request in enumerate(requests):
        batch.admit(number, max_tokens=MAX_TOKENS, ignore_eos="format" not in request, **request)
    row_answers = batch.run()
    return [row_answers[number] for number in range(len(requests))]


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[Answer]:
    """The answers of rows that run alone; checks their thoughts against unbounded thoughts."""
    row_answers = []
    for number, request in enumerate(REQUESTS):
        batch = answers(loaded)
        batch.admit(number, max_tokens=MAX_TOKENS, ignore_eos="format" not in request, **request)
        answer = batch.run()[number]
        row_answers.append(answer)
        if "thinking_budget" not in request:
            continue
        most = request["thinking_budget"]
        free = answers(loaded)
        left = {key: value for key, value in request.items() if key not in ("format",)}
        left["thinking_budget"] = -1
        free.admit(number, max_tokens=MAX_TOKENS, ignore_eos=True, **left)
        assert answer.ids[:most] == free.run()[number].ids[:most]
        assert answer.ids[most : most + len(end_of_thoughts())] == end_of_thoughts()
    return row_answers


@pytest.mark.parametrize(("layout", "ahead"), WAYS)
def test_an_answer_does_not_depend_on_rows_beside_it(
    loaded: LoadedModel, alone: list[Answer], layout: str, ahead: bool
) -> None:
    for answer, other in zip(
        run(answers(loaded, layout, ahead=ahead), REQUESTS), alone, strict=True
    ):
        assert (
            answer.ids == other.ids
            and answer.text == other.text
            and answer.end == {**other.end, **{"timings_ms": answer.end["timings_ms"]}}
        )
        assert [each["id"] for each in answer.logprobs] == [each["id"] for each in other.logprobs]
    assert [each["id"] for each in alone[4].logprobs] == alone[4].ids


def test_a_format_holds_behind_the_thoughts(alone: list[Answer]) -> None:
    answer = alone[5]
    assert answer.end["reason"] == "stop" and answer.end["complete"] is True
    assert set(json.loads(answer.text.partition("</think>")[2])) == {"number"}
    assert "complete" not in alone[0].end, "without a format none is complete"


def test_drafts_end_at_the_bound(loaded: LoadedModel, alone: list[Answer]) -> None:
    row_answers = run(answers(loaded, "pool", speculates=True), REQUESTS)
    assert [answer.ids for answer in row_answers] == [answer.ids for answer in alone]


@pytest.mark.parametrize("request_number", [0, 1, 4])
def test_a_resumed_answer_is_bounded_as_before(
    loaded: LoadedModel, alone: list[Answer], request_number: int
) -> None:
    """Tests resumes before the bound, inside the mark that ends the thoughts, and after it."""
    request, whole = REQUESTS[request_number], alone[request_number].ids
    most = request["thinking_budget"]
    for had in (1, most, most + 1, most + len(end_of_thoughts()), MAX_TOKENS - 1):
        batch = answers(loaded)
        batch.admit(
            request_number,
            had=whole[:had],
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            **request,
        )
        assert batch.run()[request_number].ids == whole, had
