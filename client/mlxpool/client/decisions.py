"""What models that generate text are asked by `decide`, and what they answer."""

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
# Labels of which one is picked; range(1, 11): a number from 1 to 10; None: yes or no.
AnswerChoices: TypeAlias = Sequence[str] | range | None
# A question that is answered yes or no, or a question with its choices.
Asked: TypeAlias = str | tuple[str, AnswerChoices]


class Decision(Struct, frozen=True):
    """The answer to a question: the label with the greatest probability.

    A label is a text, True or False (yes or no), or a number.
    """

    answer: Label
    probabilities: Mapping[Label, float]  # of all labels in their order; their sum is 1
    outside: float  # the probability that the model gives another answer

    @property
    def probability(self) -> float:
        """The probability of the answer."""
        return self.probabilities[self.answer]

    @property
    def expected(self) -> float:
        """The mean of a scale, or the probability of yes. Raises TypeError for texts."""
        mean = 0.0
        for label, share in self.probabilities.items():
            if isinstance(label, str):
                raise TypeError("labels that are texts have no mean")
            mean += label * share
        return mean


class DecisionList(list[Decision]):
    """The answers in the order of the questions; `usage` is {prompt_tokens, total_tokens}."""

    def __init__(self, found: Iterable[Decision], usage: Mapping[str, int]) -> None:
        super().__init__(found)
        self.usage = usage

    @classmethod
    def of(cls, result: Result, questions: Sequence[Asked | Mapping[str, Any]]) -> DecisionList:
        """The answers of a `decide` job with these questions, also in the form of its line.

        Raises ValueError for another job.
        """
        answer = result.answer
        if answer is None or answer.kind != protocol.DECISIONS:
            raise ValueError("the result has no decisions: its job is no decide")
        asked = [
            protocol.Question.parse(f"questions[{index}]", one)
            if isinstance(one, Mapping)
            else _asked(f"questions[{index}]", one)
            for index, one in enumerate(questions)
        ]
        return _read(asked, answer.fields["decisions"], result.usage)


def decide(
    model: str,
    prompt: str,
    questions: Sequence[Asked],
    *,
    temperature: float | None = None,
    deadline_ms: int | None = None,
) -> list[Question[DecisionList]]:
    """The calls for questions about a text, as many in each as it takes. Raises BadRequest.

    The first call reads the text for all: send the others when it is answered.
    """
    if not isinstance(prompt, str):
        raise BadRequest(f"prompt must be a str, got {shown(prompt)}")
    if isinstance(questions, str | Mapping) or not isinstance(questions, Iterable):
        raise BadRequest(f"questions must be a list, got {shown(questions)}")
    asked = [_asked(f"questions[{index}]", one) for index, one in enumerate(questions)]
    if not asked:
        raise BadRequest("questions is empty, must have at least 1 question")
    fields: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    try:
        data = prompt.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"prompt is not Unicode: {error}") from None
    blobs = (data,) if len(data) > TEXT_AS_BLOB else ()
    fields["prompt"] = True if blobs else prompt
    calls = []
    for first in range(0, len(asked), MAX_QUESTIONS):
        some = asked[first : first + MAX_QUESTIONS]
        given = {**fields, "questions": [one.body() for one in some]}
        if first:
            given["first"] = first
        call = ModelCall(DECIDE, model, given, blobs, deadline_ms=deadline_ms)
        calls.append(Question(os.urandom(ID_BYTES), call, _Reader(tuple(some))))
    return calls


def _asked(name: str, raw: Any) -> protocol.Question:
    """A question of the protocol. Raises BadRequest; `name` is what errors call it."""
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
        """Raises ValueError for an answer to other questions."""
        return _read(self.questions, answer.body["decisions"], answer.body["usage"])


def _read(
    questions: Sequence[protocol.Question],
    rows: Sequence[Mapping[str, Any]],
    usage: Mapping[str, int],
) -> DecisionList:
    """Raises ValueError for another number of answers than of questions."""
    found = [_decision(*one) for one in zip(questions, rows, strict=True)]
    return DecisionList(found, dict(usage))


def _decision(question: protocol.Question, row: Mapping[str, Any]) -> Decision:
    names: Sequence[Label] = question.labels
    if question.scale is not None:
        names = [int(one) for one in question.labels]
    elif not question.choices:
        names = [True, False]
    shares = dict(zip(names, map(float, row["probabilities"]), strict=True))
    return Decision(max(shares, key=shares.__getitem__), shares, float(row["outside"]))


def joined(parts: Sequence[DecisionList]) -> DecisionList:
    """The answers of all calls, one after the other."""
    usage = {key: sum(one.usage.get(key, 0) for one in parts) for key in parts[0].usage}
    return DecisionList((decision for one in parts for decision in one), usage)
