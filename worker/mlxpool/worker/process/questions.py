"""From calls to jobs, and from the results of jobs to messages and answers. Pure."""

from __future__ import annotations

from mlxpool.common.errors import BadRequest, PoolError, TooLarge
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.decisions import DecideCall
from mlxpool.common.protocol.encoder_calls import NUMBER_BYTES, EncoderCall
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.prompts import ChatPrompt
from mlxpool.common.protocol.to_worker import Tokenize
from mlxpool.common.protocol.token_ids import count_of, unpack_ids
from mlxpool.worker.compute.messages import AskedQuestion, CallKey, Decide
from mlxpool.worker.decisions.answers import Answers
from mlxpool.worker.decisions.prompts import AskQuestions
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.encoders.vectors import require_dimensions
from mlxpool.worker.preparation.jobs import (
    Asked,
    Decoded,
    Encode,
    Encoded,
    EncodedInputs,
    Job,
    Render,
    Result,
)
from mlxpool.worker.prompt.chat_template.output_format import chat_format
from mlxpool.worker.prompt.size_bound import check_ids
from mlxpool.worker.prompt.text_model import Opened

COUNTS = "this model counts: it has no probabilities, so it does not decide"
CHANNELS = "decide is not supported with models that answer in channels: their next token is none"


def encode_of_call(call: Tokenize, plain: bool, now: float) -> Job:
    """The job of a `tokenize`; `plain`: see Render.

    Raises BadRequest for a chat that no template can take.
    """
    if not isinstance(call.text, ChatPrompt):
        return Encode(call.text)
    chat = call.text
    return Render(
        check_messages(chat.messages),
        check_tools(chat.tools),
        check_think(chat.think),
        now,
        context=0,
        plain=plain,
    )


def answer_of(result: Result) -> CallAnswer:
    """The answer to a call of the tokenizer."""
    if isinstance(result, Encoded):
        thinks = {"thinks": True} if result.thinks else {}
        return CallAnswer({"n": count_of(result.packed), **thinks}, (result.packed,))
    if isinstance(result, Decoded):
        each = {} if result.each is None else {"each": result.each}
        return CallAnswer({"text": result.text, **each})
    assert isinstance(result, PoolError)
    return CallAnswer(result.body())


def check_call(opened: OpenedEncoder, call: EncoderCall) -> None:
    """Raises BadRequest for what this model does not do, TooLarge for an answer over its bound."""
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


def inputs_of(found: EncodedInputs) -> tuple[EncoderInput, ...]:
    """The inputs that a lane made."""
    ids, types, begin, inputs = unpack_ids(found.packed), found.types, 0, []
    for length in found.lengths:
        end = begin + length
        inputs.append(EncoderInput(tuple(ids[begin:end]), tuple(types[begin:end])))
        begin = end
    return tuple(inputs)


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


def message_of(opened: Opened, key: CallKey, id: bytes, call: DecideCall, asked: Asked) -> Decide:
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
