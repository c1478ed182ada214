"""Tests answers with a format in batches of the demo model, with and without a pass in flight."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.constrained_answers import Answers, compiler, demo
from support.drawn_schemas import SCHEMAS

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import BadRequest  # noqa: E402
from mlxpool.worker.constraints.constraint import Constraint  # noqa: E402
from mlxpool.worker.engine.model_engine import ModelEngine  # noqa: E402
from mlxpool.worker.scheduling.context_policy import ContextShift  # noqa: E402
from mlxpool.worker.weights.load import LoadedModel, load  # noqa: E402
from support.model_engines import model_engine  # noqa: E402

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMATS: list[dict[str, Any] | None] = [
    {"type": "json_schema", "schema": PERSON},
    None,
    {"type": "regex", "pattern": "[a-z]{3,8}(-[0-9]{2}){1,3}"},
    None,
    {"type": "choice", "choices": ["yes", "no", "perhaps not"]},
    {"type": "json"},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.7, "repeat_penalty": 1.6, "repeat_last_n": 8},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"logit_bias": {"5": 20.0, "6": -100.0}, "presence_penalty": 1.0},
    {"min_p": 0.05, "frequency_penalty": 0.5},
]
AHEAD = pytest.mark.parametrize("lookahead", [False, True])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(demo()[0])


def answers(loaded: LoadedModel, *, lookahead: bool = False) -> Answers:
    return Answers(model_engine(loaded, demo()[1], prefix="off", lookahead=lookahead))


def request(number: int) -> dict[str, Any]:
    format = FORMATS[number % len(FORMATS)]
    return {**OPTIONS[number % len(OPTIONS)], **({} if format is None else {"format": format})}


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> list[list[int]]:
    """Returns the ids of each request, computed alone."""
    ids = []
    for number in range(len(FORMATS)):
        batch = answers(loaded)
        batch.admit(number, **request(number))
        ids.append(batch.run()[number].ids)
    return ids


@AHEAD
def test_a_mixed_batch_gives_every_row_what_it_gets_alone(
    loaded: LoadedModel, alone: list[list[int]], lookahead: bool
) -> None:
    batch = answers(loaded, lookahead=lookahead)
    for number in range(len(FORMATS)):
        batch.admit(number, **request(number))
    results = batch.run()
    assert [results[number].ids for number in range(len(FORMATS))] == alone
    for number, format in enumerate(FORMATS):
        end = results[number].end
        assert "code" not in end
        if format is None:
            assert "complete" not in end
        else:
            assert end["complete"] is (end["reason"] == "stop")
    person = results[0]
    assert person.end["reason"] == "stop"
    jsonschema.validate(json.loads(person.text), PERSON)
    assert results[4].text in ("yes", "no", "perhaps not")


def test_white_space_does_not_go_on_for_ever(loaded: LoadedModel) -> None:
    """A model that prefers white space writes at most one space in a row, and its answer ends."""
    _, _, table = demo()
    spaces = [token for token, piece in enumerate(table.pieces) if piece and not piece.strip()]
    options: dict[str, Any] = {"logit_bias": {str(token): 100.0 for token in spaces}}
    numbers = {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3}
    batch = answers(loaded)
    schemas = [PERSON, {"type": "object", "properties": {"a": numbers}, "required": ["a"]}]
    for number, schema in enumerate([*schemas, {**schemas[1], "additionalProperties": False}]):
        format = {"type": "json_schema", "schema": schema}
        batch.admit(number, format=format, temperature=0.0, max_tokens=150, **options)
    for number, answer in batch.run().items():
        outside = re.sub(r'"[^"]*"', '""', answer.text)
        assert " " in outside and not re.search(r"\s\s|[^ \S]|[^:,] ", outside), answer.text
        if number != 1:  # schema 1 allows any further keys, so its answer may not end
            assert answer.end["reason"] == "stop" and json.loads(answer.text)


def test_classes_of_unicode_fit_the_bounds(loaded: LoadedModel) -> None:
    """Patterns with classes of Unicode characters, as in ordinary schemas, exceed no bound."""
    batch = answers(loaded)
    patterns = [r"^\p{Letter}{8}cole$", r"^\p{L}+$", r"^(\p{Lu}\p{Ll}+ ){2}$", r"^\w+ \w+$"]
    for number, pattern in enumerate(patterns):
        format = {"type": "json_schema", "schema": {"type": "string", "pattern": pattern}}
        batch.admit(number, format=format, max_tokens=30, temperature=1.0, top_k=0, top_p=1.0)
    assert all("code" not in answer.end for answer in batch.run().values())


@AHEAD
def test_a_preempted_row_keeps_its_state(
    loaded: LoadedModel, alone: list[list[int]], lookahead: bool
) -> None:
    batch = answers(loaded, lookahead=lookahead)
    row = batch.admit(0, **request(0))
    while len(row.ids) < 5:
        batch.step()
    batch.generations.release(row)
    row.preempt()
    assert batch.run()[0].ids == alone[0]


def test_an_answer_goes_on_at_every_id(loaded: LoadedModel, alone: list[list[int]]) -> None:
    batch = answers(loaded)
    for count in range(0, len(alone[0]), 3):
        batch.admit(count, had=alone[0][:count], **request(0))
    for answer in batch.run().values():
        assert answer.ids == alone[0]
        assert answer.end["complete"] is True


def test_max_tokens_and_stop_strings_end_an_answer_that_is_not_complete(
    loaded: LoadedModel,
) -> None:
    batch = answers(loaded)
    batch.admit(1, max_tokens=4, **request(0))
    batch.admit(2, stop=['"age'], **request(0))
    batch.admit(3, stop=["]}"], **request(0))
    results = batch.run()
    ends = [
        (results[number].end["reason"], results[number].end["complete"]) for number in (1, 2, 3)
    ]
    assert ends == [("length", False), ("stop", False), ("stop", True)]
    assert len(results[1].ids) == 4
    assert results[2].text.endswith(", ") and results[3].text.endswith(("[", '"'))


def test_a_full_context_shifts_under_an_answer(loaded: LoadedModel) -> None:
    """The state of the format follows from all ids, not only from the ids still in the context."""
    format = {"type": "regex", "pattern": "([a-z]{1,5} ){60}end"}
    options: dict[str, Any] = {"format": format, "temperature": 0.7}
    batches = [answers(loaded, lookahead=ahead) for ahead in (False, True)]
    for batch in batches:
        row = batch.admit(7, max_tokens=400, shift=True, num_ctx=48, **options)
        row.shift = ContextShift(48, 4, ())
    first, second = (batch.run()[7] for batch in batches)
    assert first.ids == second.ids and len(first.ids) > 48
    assert first.end["reason"] == "stop" and first.text.endswith("end")


@AHEAD
@pytest.mark.parametrize("place", ["mask", "take"])
def test_what_fails_for_a_format_ends_its_own_stream(
    loaded: LoadedModel,
    alone: list[list[int]],
    lookahead: bool,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[Constraint, int] = {}
    true = getattr(Constraint, place)

    def failing(self: Constraint, *arguments: Any) -> Any:
        calls[self] = calls.get(self, 0) + 1
        if self is broken and calls[self] == 4:
            raise BadRequest("format: too complex")
        return true(self, *arguments)

    monkeypatch.setattr(Constraint, place, failing)
    batch = answers(loaded, lookahead=lookahead)
    broken = batch.generations.of(batch.admit(9, **request(0))).constraint
    for number in range(3):
        batch.admit(number, **request(number))
    results = batch.run()
    assert results[9].end["code"] == "bad_request"
    assert results[9].end["message"] == "format: too complex"
    count = len(results[9].ids)
    assert count < len(alone[0]) and results[9].ids == alone[0][:count]
    assert [results[number].ids for number in range(3)] == alone[:3]


def test_a_batch_without_formats_asks_nothing(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ModelEngine, "forward")
    batch = answers(loaded)
    batch.admit(1, max_tokens=4)
    assert len(batch.run()[1].ids) == 4


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4))
def test_every_answer_that_stops_is_valid(loaded: LoadedModel, schemas: list[Any]) -> None:
    batch = answers(loaded)
    for number, schema in enumerate(schemas):
        format = {"type": "json_schema", "schema": schema}
        batch.admit(number, format=format, max_tokens=80, temperature=1.0, top_k=0, top_p=1.0)
    for number, answer in batch.run().items():
        assert answer.end.get("reason") in ("stop", "length"), (schemas[number], answer.end)
        assert answer.end["complete"] or answer.end["reason"] == "length"
        if answer.end["reason"] == "stop":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(json.loads(answer.text), schemas[number], format_checker=checker)
    assert compiler().knows({"type": "json_schema", "schema": schemas[0]})
