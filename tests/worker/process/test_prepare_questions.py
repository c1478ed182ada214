"""`decide` between the broker and the compute thread: which models decide, and what is sent on."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, ContextExceeded
from mlxpool.common.protocol.decisions import DecideCall, Question
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import Answer, AskedQuestion, CallKey
from mlxpool.worker.preparation.jobs import Asked, Result, Unpacker, pack, unpack
from mlxpool.worker.process.preparations import PreparedQuestions
from mlxpool.worker.process.prepare import product_of_questions
from mlxpool.worker.process.questions import (
    CHANNELS,
    COUNTS,
    job_of_questions,
)
from mlxpool.worker.prompt.text_model import Opened, TextSource, TokenTable

CALL = DecideCall("a text", (Question("why?"), Question("?", ("a", "b"))), 2.0, 64, True, "me")
KEY, ID = CallKey(7), bytes(16)


def opened(*templates: str, text: bool = True) -> Opened:
    sources = {str(number): source for number, source in enumerate(templates)}
    source = TextSource("", "", (), sources, {}, None) if text else None
    return Opened("", 50, 100, TokenTable((), None), source)


def product(result: Result) -> Any:
    return product_of_questions(opened(), KEY, ID, CALL, 3, result)


def test_the_job_says_how_the_model_is_asked() -> None:
    plain = job_of_questions(opened(), CALL, 5.0)
    assert (plain.chat, plain.think, plain.now, plain.context, plain.first) == (
        *(False, None, 5.0, 50, 64),
    )
    assert list(plain.questions) == [
        {"question": "why?"},
        {"question": "?", "choices": ["a", "b"]},
    ]
    assert job_of_questions(opened("{{ messages }}"), CALL, 0.0).think is None
    thinker = job_of_questions(opened("{% if enable_thinking %}<think>{% endif %}"), CALL, 0.0)
    assert thinker.chat and thinker.think is False


def test_models_that_cannot_decide_are_refused_by_name() -> None:
    with pytest.raises(BadRequest, match=COUNTS):
        job_of_questions(opened(text=False), CALL, 0.0)
    with pytest.raises(BadRequest, match=CHANNELS):
        job_of_questions(opened("<|channel|>analysis"), CALL, 0.0)


def test_prompts_and_answers_reach_the_compute_thread() -> None:
    asked = Asked(
        pack_ids([1, 2]),
        [pack_ids([3]), pack_ids([4, 5])],
        [[[[6], [7, 8]], [[9]]], [[[6]], [[7]]]],
    )
    (fields,) = Unpacker().feed(pack(asked))  # as it comes from a lane
    found = product(unpack(fields))
    assert isinstance(found, PreparedQuestions) and found.fence == 3
    message = found.message
    assert (message.key, message.id, message.shared, message.owner) == (KEY, ID, 2, "me")
    assert (message.temperature, message.first, message.alone) == (2.0, 64, True)
    first, second = message.questions
    assert isinstance(first, AskedQuestion) and first.prompt == (1, 2, 3)
    assert first.answers.paths == (((6,), (7, 8)), ((9,),))
    assert first.branches == {(): (6, 7, 9), (7,): (8,)}
    assert second.prompt == (1, 2, 4, 5) and second.branches == {(): (6, 7)}


def test_an_error_is_the_answer_to_the_call() -> None:
    answer = product(ContextExceeded("too long"))
    assert isinstance(answer, Answer)
    assert (answer.key, answer.id, answer.fence) == (KEY, ID, 3)
    assert answer.content.fields["code"] == "context_exceeded"
    beyond = product(Asked(b"", [pack_ids([3]), pack_ids([100])], [[[[1]]], [[[1]]]]))
    assert "questions[65]" in beyond.content.fields["message"], beyond
