"""Prepares calls (`tokenize`, `decide`, and calls of encoder models). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES, EncoderCall
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.prompts import ChatPrompt
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize
from mlxpool.common.protocol.token_ids import count_of, unpack_ids
from mlxpool.worker.compute.messages import CallKey, Compute, Decide, EncodedQuestion
from mlxpool.worker.decisions.answers import Answers
from mlxpool.worker.decisions.prompts import AskQuestions
from mlxpool.worker.encoders.inputs import EncodeInputs, EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.encoders.text import check_ids as check_inputs
from mlxpool.worker.encoders.vectors import require_dimensions
from mlxpool.worker.preparation.jobs import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    EncodedInputs,
    Job,
    QuestionPrompts,
)
from mlxpool.worker.process.prompts import Arrival, Preparation, answers_in_channels, render_of
from mlxpool.worker.prompt.size_bound import check_ids
from mlxpool.worker.prompt.text_model import Opened

COUNTS = "this model counts: it has no probabilities, so it does not decide"
CHANNELS = "decide is not supported with models that answer in channels: they begin with a channel"


# ---- calls of the tokenizer ----------------------------------------------------------------------


def prepare_tokenize(
    opened: Opened | OpenedEncoder, key: CallKey, call: Tokenize, arrival: Arrival
) -> Preparation:
    """Returns the preparation of a `tokenize` call.

    Raises BadRequest if no chat template takes the call's chat.
    """
    job: Job
    if isinstance(call.text, ChatPrompt):
        plain = isinstance(opened, Opened) and opened.plain_contents
        job = render_of(call.text, arrival.now, 0, plain=plain)
    else:
        job = Encode(call.text)
    return Preparation(call.owner, call.size, job, _tokens)


def _tokens(result: Encoded) -> CallAnswer:
    thinks = {"thinks": True} if result.thinks else {}
    return CallAnswer({"n": count_of(result.packed), **thinks}, (result.packed,))


def prepare_detokenize(
    opened: Opened | OpenedEncoder, key: CallKey, call: Detokenize, arrival: Arrival
) -> Preparation:
    job = Decode(call.packed, opened.vocab_size, call.each)
    return Preparation(call.owner, call.size, job, _text)


def _text(result: Decoded) -> CallAnswer:
    each = {} if result.each is None else {"each": result.each}
    return CallAnswer({"text": result.text, **each})


# ---- calls of `decide` ---------------------------------------------------------------------------


def prepare_decide(opened: Opened, key: CallKey, call: DecideCall, arrival: Arrival) -> Preparation:
    """Returns the preparation of a `decide` call, whose questions have labels as answers.

    Raises BadRequest if the model cannot decide.
    """
    if opened.source is None:
        raise BadRequest(COUNTS)
    if answers_in_channels(opened):
        raise BadRequest(CHANNELS)
    templates = opened.source.templates
    can_think = any("enable_thinking" in source for source in templates.values())
    job = AskQuestions(
        call.prompt,
        [question.body() for question in call.questions],
        bool(templates),
        False if can_think else None,
        arrival.now,
        opened.context,
        call.first,
    )
    return Preparation(call.owner, call.size, job, partial(_decide, opened, key, call))


def _decide(opened: Opened, key: CallKey, call: DecideCall, prompts: QuestionPrompts) -> Decide:
    """Returns the message for the compute thread, with the prompts of a `decide` call.

    Raises BadRequest for an id without an embedding.
    """
    shared = unpack_ids(prompts.shared)
    questions = []
    for number, (tail, answers) in enumerate(zip(prompts.tails, prompts.answers, strict=True)):
        prompt = (*shared, *unpack_ids(tail))
        paths = tuple(tuple(map(tuple, label)) for label in answers)
        label_ids = [token for label in paths for path in label for token in path]
        check_ids([*prompt, *label_ids], opened.vocab_size, f"questions[{call.first + number}]")
        labels = Answers(paths)
        questions.append(EncodedQuestion(prompt, labels, labels.branches()))
    return Decide(
        key,
        tuple(questions),
        len(shared),
        call.owner,
        call.temperature,
        call.first,
        call.alone,
    )


# ---- calls for encoder models --------------------------------------------------------------------


def prepare_encode(
    opened: OpenedEncoder, key: CallKey, call: EncoderCall, arrival: Arrival
) -> Preparation | Compute:
    """Returns the preparation of a call, or the message of a call with token ids.

    Raises BadRequest for a task that this model does not have, TooLarge for an answer over the size
    limit, and ContextExceeded.
    """
    if call.task not in opened.tasks:
        can = " and ".join(sorted(opened.tasks))
        raise BadRequest(f"this model does not {call.task}: it is a model for {can}")
    if call.dimensions:
        require_dimensions(call.dimensions, opened.dimensions)
    columns = call.dimensions or opened.dimensions or len(opened.labels) or 1
    size = call.count * columns * NUMBER_BYTES
    if size > MAX_BLOB:
        raise TooLarge(
            f"{call.count} vectors of {columns} numbers have {size} bytes, an answer has at most"
            f" {MAX_BLOB}: send {MAX_BLOB // (columns * NUMBER_BYTES)} inputs at most in a call"
        )
    if call.ids:
        check_inputs(call.ids, opened.context, opened.vocab_size, call.first)
        return _compute(key, call, [EncoderInput(ids) for ids in call.ids])
    job = EncodeInputs(
        call.texts, call.pairs, call.prompt_name, call.prompt, call.truncate, call.first
    )
    return Preparation(
        call.owner, call.size, job, lambda found: _compute(key, call, _inputs(found))
    )


def _inputs(encoded: EncodedInputs) -> list[EncoderInput]:
    """Returns the inputs in a lane process's result."""
    ids, types, begin, inputs = unpack_ids(encoded.packed), encoded.types, 0, []
    for length in encoded.lengths:
        end = begin + length
        inputs.append(EncoderInput(tuple(ids[begin:end]), tuple(types[begin:end])))
        begin = end
    return inputs


def _compute(key: CallKey, call: EncoderCall, inputs: Sequence[EncoderInput]) -> Compute:
    return Compute(
        key,
        inputs,
        call.owner,
        call.dimensions,
        call.normalise,
        call.first,
        call.alone,
    )
