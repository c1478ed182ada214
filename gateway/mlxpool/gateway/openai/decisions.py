"""Requests and responses of /v1/decisions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.client import Decision, DecisionList
from mlxpool.client.decisions import AnswerChoices, Asked
from mlxpool.common.checks import is_number, shown
from mlxpool.common.protocol.decisions import (
    MAX_QUESTIONS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Question,
)
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.openai.fields import DECISIONS, QUESTION


class DecisionRequest(Struct, frozen=True):
    """A checked request to /v1/decisions.

    `settings`: keyword arguments of the client's `decide_all`.
    """

    model: str
    prompt: str
    questions: list[Asked]
    settings: Mapping[str, Any]


def decisions(body: Mapping[str, Any]) -> DecisionRequest:
    """Checks the body of a request to /v1/decisions. Raises HttpError naming the field."""
    body = DECISIONS.check(body)
    raw_questions, prompt = body.get("questions"), fields.text(body, "prompt")
    if not prompt.strip():
        raise bad_request("'prompt' has no text but white space", "prompt")
    if not isinstance(raw_questions, list) or not 1 <= len(raw_questions) <= MAX_QUESTIONS:
        got = f"{len(raw_questions)}" if isinstance(raw_questions, list) else shown(raw_questions)
        message = f"'questions' must be a list of 1 to {MAX_QUESTIONS} maps, got {got}"
        raise bad_request(message, "questions")
    questions = [_question(f"questions[{index}]", raw) for index, raw in enumerate(raw_questions)]
    settings = {"temperature": _temperature(body)}
    return DecisionRequest(fields.text(body, "model"), prompt, questions, settings)


def _question(name: str, raw: Any) -> Asked:
    if isinstance(raw, Mapping):
        QUESTION.check(raw, f"{name}.")
    question: Question = fields.checked(name, lambda value: Question.parse(name, value), raw)
    choices: AnswerChoices = question.choices or None
    if question.scale is not None:
        low, high = question.scale
        choices = range(low, high + 1)
    return question.text, choices


def _temperature(body: Mapping[str, Any]) -> float | None:
    value = body.get("temperature")
    if value is None:
        return None
    if not is_number(value) or not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
        bounds = f"from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        message = f"'temperature' must be {bounds}, got {shown(value)}"
        raise bad_request(message, "temperature")
    return float(value)


def decisions_body(
    request: DecisionRequest, decision_list: DecisionList, name: str
) -> dict[str, Any]:
    """Returns the response of /v1/decisions; `name` is its id."""
    data = [
        {"index": index, "object": "decision", **decision_body(decision)}
        for index, decision in enumerate(decision_list)
    ]
    answer = {"id": name, "object": "list", "model": request.model, "data": data}
    return {**answer, "usage": dict(decision_list.usage)}


def decision_body(decision: Decision) -> dict[str, Any]:
    """Returns the body of an answer. Labels are JSON keys, so yes, no and numbers become text."""
    named = {True: "yes", False: "no"}
    yes_no = isinstance(decision.answer, bool)
    shares = {
        named[bool(label)] if yes_no else str(label): share
        for label, share in decision.probabilities.items()
    }
    body = {"answer": decision.answer, "probabilities": shares, "outside": decision.outside}
    if not isinstance(decision.answer, str):
        body["expected"] = decision.expected
    return body
