"""The calls `decide` and their answers, for models that generate text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from mlxpool.client.request import Question
from mlxpool.client.stream import Result
from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol import decisions as protocol
from mlxpool.common.protocol.decisions import DECIDE, MAX_QUESTIONS
from mlxpool.common.protocol.frames import ID_BYTES, TEXT_AS_BLOB, Message
from mlxpool.common.protocol.from_client import ModelCall

Label: TypeAlias = str | bool | int
# Possible answers: texts; range(1, 11): a number from 1 to 10; None: yes or no.
AnswerChoices: TypeAlias = Sequence[str] | range | None
# A yes-or-no question, or a question with its possible answers.
Asked: TypeAlias = str | tuple[str, AnswerChoices]


class Decision(Struct, frozen=True):
    """The answer to a question: the label with the greatest probability.

    A label is a text, a boolean (yes or no), or a number.
    """

    answer: Label  # the label with the greatest probability
    probabilities: Mapping[Label, float]  # each label's probability, in the labels' order; sum: 1
    outside: float  # the probability of all answers that are not labels

    @property
    def probability(self) -> float:
        """The probability of the answer."""
        return self.probabilities[self.answer]

    @property
    def expected(self) -> float:
        """The mean of a scale, weighted by the probabilities, or the probability of yes.

        Raises TypeError if labels are texts.
        """
        mean = 0.0
        for label, share in self.probabilities.items():
            if isinstance(label, str):
                raise TypeError("labels that are texts have no mean")
            mean += label * share
        return mean


class DecisionList(list[Decision]):
    """The answers in the order of the questions; `usage` is {prompt_tokens, total_tokens}."""

    def __init__(self, decisions: Iterable[Decision], usage: Mapping[str, int]) -> None:
        super().__init__(decisions)
        self.usage = usage

    @classmethod
    def of(cls, result: Result, questions: Sequence[Asked | Mapping[str, Any]]) -> DecisionList:
        """Returns the answers of a `decide` job to `questions`, the questions of this job.

        Questions are given as for `decide_all`, or as maps. Raises ValueError if the result belongs
        to another kind of job.
        """
        answer = result.answer
        if answer is None or answer.kind != protocol.DECISIONS:
            raise ValueError("the result has no decisions: its job is no decide")
        parsed = [
            protocol.Question.parse(f"questions[{index}]", question)
            if isinstance(question, Mapping)
            else _parsed(f"questions[{index}]", question)
            for index, question in enumerate(questions)
        ]
        return _read(parsed, answer.fields["decisions"], result.usage)


def decide(
    model: str,
    prompt: str,
    questions: Sequence[Asked],
    *,
    temperature: float | None = None,
    deadline_ms: int | None = None,
) -> list[Question[DecisionList]]:
    """Returns the calls for questions about a text, each call with up to MAX_QUESTIONS questions.

    The first call reads the text into the prefix cache: send the other calls after its answer.
    Raises BadRequest naming the faulty value.
    """
    if not isinstance(prompt, str):
        raise BadRequest(f"prompt must be a str, got {shown(prompt)}")
    if isinstance(questions, str | Mapping) or not isinstance(questions, Iterable):
        raise BadRequest(f"questions must be a list, got {shown(questions)}")
    parsed = [_parsed(f"questions[{index}]", item) for index, item in enumerate(questions)]
    if not parsed:
        raise BadRequest("questions is empty, must have at least 1 question")
    fields: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    try:
        data = prompt.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"prompt is not Unicode: {error}") from None
    blobs = (data,) if len(data) > TEXT_AS_BLOB else ()
    fields["prompt"] = True if blobs else prompt
    calls = []
    for first in range(0, len(parsed), MAX_QUESTIONS):
        part = parsed[first : first + MAX_QUESTIONS]
        body = {**fields, "questions": [question.body() for question in part]}
        if first:
            body["first"] = first
        call = ModelCall(DECIDE, model, body, blobs, deadline_ms=deadline_ms)
        calls.append(Question(os.urandom(ID_BYTES), call, _Reader(tuple(part))))
    return calls


def _parsed(name: str, raw: Any) -> protocol.Question:
    """Returns a question as a record. Raises BadRequest; errors call the question `name`."""
    text, choices = (raw, None) if isinstance(raw, str) else _pair(name, raw)
    body: dict[str, Any] = {"question": text}
    if isinstance(choices, range):
        if len(choices) < 2 or choices.step != 1:
            raise BadRequest(f"{name} has {choices}, must be a range of 2 numbers or more, step 1")
        body["scale"] = [choices[0], choices[-1]]
    elif choices is not None:
        if isinstance(choices, str | Mapping) or not isinstance(choices, Iterable):
            raise BadRequest(f"{name} must have a list of texts or a range, got {shown(choices)}")
        body["choices"] = list(choices)
    return protocol.Question.parse(name, body)


def _pair(name: str, raw: Any) -> tuple[Any, Any]:
    if not isinstance(raw, tuple | list) or len(raw) != 2 or not isinstance(raw[0], str):
        raise BadRequest(f"{name} must be a question, or (question, choices), got {shown(raw)}")
    return raw[0], raw[1]


class _Reader(Struct, frozen=True):
    """Reads the answer to a call with these questions."""

    questions: tuple[protocol.Question, ...]

    def __call__(self, answer: Message) -> DecisionList:
        """Returns the decisions. Raises ValueError if the answer does not fit the questions."""
        return _read(self.questions, answer.body["decisions"], answer.body["usage"])


def _read(
    questions: Sequence[protocol.Question],
    rows: Sequence[Mapping[str, Any]],
    usage: Mapping[str, int],
) -> DecisionList:
    """Returns the decisions. Raises ValueError unless there is one map for each question."""
    decisions = [_decision(*pair) for pair in zip(questions, rows, strict=True)]
    return DecisionList(decisions, dict(usage))


def _decision(question: protocol.Question, row: Mapping[str, Any]) -> Decision:
    names: Sequence[Label] = question.labels
    if question.scale is not None:
        names = [int(label) for label in question.labels]
    elif not question.choices:
        names = [True, False]
    shares = dict(zip(names, map(float, row["probabilities"]), strict=True))
    return Decision(max(shares, key=shares.__getitem__), shares, float(row["outside"]))


def joined(parts: Sequence[DecisionList]) -> DecisionList:
    """Returns the answers of all calls as one list."""
    usage = {key: sum(part.usage.get(key, 0) for part in parts) for key in parts[0].usage}
    return DecisionList((decision for part in parts for decision in part), usage)
