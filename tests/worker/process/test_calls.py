"""Tests `decide` between broker and compute thread: the models that decide, and the messages."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.decisions import DecideCall, Question
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.worker.compute.messages import CallKey, Decide, EncodedQuestion
from mlxpool.worker.preparation.jobs import QuestionPrompts, Unpacker, pack, unpack
from mlxpool.worker.process.calls import (
    CHANNELS,
    COUNTS,
    prepare_decide,
)
from mlxpool.worker.process.prompts import Arrival
from mlxpool.worker.prompt.text_model import Opened, TextSource, TokenTable

CALL = DecideCall("a text", (Question("why?"), Question("?", ("a", "b"))), 2.0, 64, True, "me")
KEY, CAME = CallKey(bytes(16), 7), Arrival(1.5, 5.0)


def opened(*templates: str, text: bool = True) -> Opened:
    sources = {str(number): source for number, source in enumerate(templates)}
    source = TextSource("", "", (), sources, {}, None) if text else None
    return Opened("", 50, 100, TokenTable((), None), source)


def job_of(opened: Opened) -> Any:
    return prepare_decide(opened, KEY, CALL, CAME).job


def test_the_job_says_how_the_model_is_asked() -> None:
    plain = job_of(opened())
    assert (plain.chat, plain.think, plain.now, plain.context, plain.first) == (
        *(False, None, 5.0, 50, 64),
    )
    assert list(plain.questions) == [
        {"question": "why?"},
        {"question": "?", "choices": ["a", "b"]},
    ]
    assert job_of(opened("{{ messages }}")).think is None
    thinker = job_of(opened("{% if enable_thinking %}<think>{% endif %}"))
    assert thinker.chat and thinker.think is False


def test_models_that_cannot_decide_are_refused_by_name() -> None:
    with pytest.raises(BadRequest, match=COUNTS):
        job_of(opened(text=False))
    with pytest.raises(BadRequest, match=CHANNELS):
        job_of(opened("<|channel|>analysis"))


def test_prompts_and_answers_reach_the_compute_thread() -> None:
    prompts = QuestionPrompts(
        pack_ids([1, 2]),
        [pack_ids([3]), pack_ids([4, 5])],
        [[[[6], [7, 8]], [[9]]], [[[6]], [[7]]]],
    )
    (fields,) = Unpacker().feed(pack(prompts))  # as it comes from a lane
    message = prepare_decide(opened(), KEY, CALL, CAME).finish(unpack(fields))
    assert isinstance(message, Decide)
    assert (message.key, message.shared, message.owner) == (KEY, 2, "me")
    assert (message.temperature, message.first, message.alone) == (2.0, 64, True)
    first, second = message.questions
    assert isinstance(first, EncodedQuestion) and first.prompt == (1, 2, 3)
    assert first.answers.paths == (((6,), (7, 8)), ((9,),))
    assert first.branches == {(): (6, 7, 9), (7,): (8,)}
    assert second.prompt == (1, 2, 4, 5) and second.branches == {(): (6, 7)}


def test_a_token_without_a_row_is_refused_by_its_question() -> None:
    beyond = QuestionPrompts(b"", [pack_ids([3]), pack_ids([100])], [[[[1]]], [[[1]]]])
    with pytest.raises(BadRequest, match=r"questions\[65\]"):
        prepare_decide(opened(), KEY, CALL, CAME).finish(beyond)
