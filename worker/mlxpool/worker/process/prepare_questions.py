"""Prepares `decide` for the compute thread: from questions to prompts, or to the call's error."""

from __future__ import annotations

from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.compute.messages import Answer, AskedQuestion, CallKey, Decide
from mlxpool.worker.decisions.answers import Answers
from mlxpool.worker.decisions.prompts import AskQuestions
from mlxpool.worker.preparation.jobs import Asked, Result
from mlxpool.worker.process.preparations import PreparedQuestions
from mlxpool.worker.prompt.chat_template.output_format import chat_format
from mlxpool.worker.prompt.size_bound import check_ids
from mlxpool.worker.prompt.text_model import Opened

COUNTS = "this model counts: it has no probabilities, so it does not decide"
CHANNELS = "decide is not supported with models that answer in channels: their next token is none"


def job_of_questions(opened: Opened, call: DecideCall, now: float) -> AskQuestions:
    """The job that makes the prompts. Raises BadRequest for a model that cannot decide."""
    if opened.source is None:
        raise BadRequest(COUNTS)
    templates = opened.source.templates
    if (chat_format(templates.values()) or {}).get("thinking") == "harmony":
        raise BadRequest(CHANNELS)
    can_think = any("enable_thinking" in source for source in templates.values())
    return AskQuestions(
        call.prompt,
        [one.body() for one in call.questions],
        bool(templates),
        False if can_think else None,
        now,
        opened.context,
        call.first,
    )


def product_of_questions(
    opened: Opened, key: CallKey, id: bytes, call: DecideCall, fence: int, result: Result
) -> PreparedQuestions | Answer:
    """The call for the compute thread, or its answer with an error."""
    try:
        if isinstance(result, PoolError):
            raise result
        assert isinstance(result, Asked)
        return PreparedQuestions(_message(opened, key, id, call, result), fence)
    except PoolError as error:
        return Answer(key, id, CallAnswer(error.body()), fence)


def _message(opened: Opened, key: CallKey, id: bytes, call: DecideCall, asked: Asked) -> Decide:
    """The message with the prompts. Raises BadRequest for an id without a row."""
    shared = unpack_ids(asked.shared)
    questions = []
    for number, (tail, answers) in enumerate(zip(asked.tails, asked.answers, strict=True)):
        prompt = (*shared, *unpack_ids(tail))
        paths = tuple(tuple(map(tuple, label)) for label in answers)
        known = [token for label in paths for path in label for token in path]
        check_ids([*prompt, *known], opened.vocab_size, f"questions[{call.first + number}]")
        found = Answers(paths)
        questions.append(AskedQuestion(prompt, found, found.branches()))
    return Decide(
        key,
        id,
        tuple(questions),
        len(shared),
        call.owner,
        call.temperature,
        call.first,
        call.alone,
    )
