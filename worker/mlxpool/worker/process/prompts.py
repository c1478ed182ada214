"""Prepares the prompts of runs: makes a job from a `work` message, then a sequence. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.prompts import ChatPrompt, PackedPrompt, TextPrompt, image_bytes
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.protocol.token_ids import count_of, unpack_ids
from mlxpool.worker.compute.messages import Admit, Compute, Decide, RunKey
from mlxpool.worker.compute.prompt_report import PromptReport
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.thought_bound import ThoughtBound
from mlxpool.worker.media.literals import check_ids_of_text
from mlxpool.worker.media.places import Inputs, with_images
from mlxpool.worker.media.spans import without
from mlxpool.worker.preparation.jobs import (
    NO_IMAGES,
    Encode,
    Encoded,
    Job,
    Render,
    image_of,
)
from mlxpool.worker.prompt.chat_template.output_format import chat_format, opens_thinking
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.infill import ENDS
from mlxpool.worker.prompt.size_bound import NO_BOUND, check_bytes, check_ids, check_tokens
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.prompt.thoughts import MARKS, Thoughts
from mlxpool.worker.scheduling import context_policy
from mlxpool.worker.scheduling.context_policy import ContextShift
from mlxpool.worker.scheduling.sequence import Sequence

NO_FILE = "the model has no tokenizer file"
# The most tokens of the mark that begins thoughts, with white space after it: these have at most 16
# characters, and a token has at least one.
MAX_MARK_TOKENS = 16

Outcome = Admit | Compute | Decide | CallAnswer  # the next message of a prepared request


class Arrival(Struct, frozen=True):
    """The arrival time of a request: `monotonic` seconds, and `now` in seconds since 1970."""

    monotonic: float
    now: float


class Preparation(Struct, frozen=True):
    """The preparation of a request.

    `job`: the job that runs first; an `Encoded` is the result itself, so no job runs. `finish`
    makes the next message from the result, and from the constraint if the answer has a `format`; it
    raises PoolError. `size`: the request's bytes or characters. `deadline`: a time in monotonic
    seconds.
    """

    owner: str
    size: int
    job: Job | Encoded
    finish: Callable[..., Outcome]
    deadline: float = math.inf
    format: Mapping[str, Any] | None = None


def prepare_run(opened: Opened, key: RunKey, work: Work, arrival: Arrival) -> Preparation:
    """Returns the preparation of a run. Raises BadRequest and ContextExceeded for a bad `work`."""
    # Templates see the time; a resume keeps the time at which its stream began.
    now = _facts(work).now
    now = arrival.now if now is None else now
    job = _job(opened, work, now)
    format = work.options.format
    if format is not None and (opened.no_format or opened.source is None):
        raise BadRequest(f"format is not supported: {opened.no_format or NO_FILE}")
    left = math.inf if work.deadline_ms is None else work.deadline_ms / 1000
    deadline = arrival.monotonic + left
    size = work.prompt.size + image_bytes(work.prompt)
    finish = partial(_admit, opened, key, work, arrival.monotonic, deadline, now)
    return Preparation(work.owner, size, job, finish, deadline, format)


def _job(opened: Opened, work: Work, now: float) -> Render | Encode | Encoded:
    """Returns the job that tokenises the prompt, or Encoded if the ids are known.

    Raises BadRequest and ContextExceeded for requests that can be refused before the job.
    """
    context = _context(opened, _facts(work), work.options)
    bound = NO_BOUND if work.options.truncate else context
    _check_biases(opened, work.options)
    if work.options.prompt_alternatives >= 0 and opened.no_prompt_logprobs:
        raise BadRequest(
            f"log-probabilities of prompts are not supported: {opened.no_prompt_logprobs}"
        )
    prompt = work.prompt
    if prompt.images and opened.images is None:
        raise BadRequest(NO_IMAGES)
    if isinstance(prompt, ChatPrompt):
        plain = work.options.plain_contents
        plain = opened.plain_contents if plain is None else plain
        continues = work.options.continue_message
        return render_of(prompt, now, bound, continues=continues, plain=plain)
    if isinstance(prompt, PackedPrompt) and prompt.key == "tokens":
        check_tokens(count_of(prompt.blob), bound)
        return Encoded(prompt.blob)
    check_bytes(prompt.size, opened.text.max_bytes_per_token, bound)
    text = prompt.text if isinstance(prompt, TextPrompt) else prompt.blob
    return Encode(text, bound, images=prompt.images, suffix=work.options.suffix)


def render_of(
    chat: ChatPrompt, now: float, context: int, *, plain: bool, continues: bool = False
) -> Render:
    """Returns the job that renders a chat. Raises BadRequest if no template can take the chat."""
    return Render(
        check_messages(chat.messages),
        check_tools(chat.tools),
        check_think(chat.think),
        now,
        context,
        chat.images,
        continues,
        plain,
    )


def _admit(
    opened: Opened,
    key: RunKey,
    work: Work,
    received: float,
    deadline: float,
    now: float,
    prompt: Encoded,
    constraint: Constraint | None = None,
) -> Admit:
    """Returns the message that admits a run, from the ids of its prompt.

    `received` and `deadline`: monotonic seconds. `now`: seconds since 1970. Replays the ids of a
    resume in the detokenizer and in the `constraint` of the request's format, so that the compute
    thread need not do this. Raises BadRequest or ContextExceeded.
    """
    if constraint is not None:
        _require_known_thoughts(opened, work, prompt)
    first, ids = _facts(work), unpack_ids(b"" if work.resume is None else work.resume.ids)
    options, context = work.options, _context(opened, first, work.options)
    whole = _inputs(opened, prompt)
    count, media = len(whole.items), whole.media
    keep = context_policy.kept_tokens(options.num_keep, count, context, media)
    removed = 0
    if options.truncate:
        removed = context_policy.truncated_tokens(count, context, keep, media)
    prompt_ids = whole.items[:keep] + whole.items[keep + removed :]
    media = without(media, keep, removed)
    check_tokens(len(prompt_ids), context)
    check_ids(ids, opened.vocab_size, "resume")
    grammar = None if constraint is None else constraint.digest
    size = len(prompt_ids)
    facts = Facts(opened.digest, context, None, size, now, prompt.thinks, removed, grammar)
    _compare(first, facts)
    max_tokens = _max_tokens(first, size, context, options)
    shift = ContextShift(context, keep, media) if options.shift else None
    if len(ids) > max_tokens:
        raise BadRequest(f"resume has {len(ids)} ids, max_tokens is {max_tokens}")
    discarded = 0 if shift is None else shift.discarded(size + len(ids))
    inside = without(media, keep, discarded)
    stops = (*options.stop, *ENDS) if options.suffix else options.stop
    detokenizer = Detokenizer(opened.text.piece, stops, opened.texts)
    detokenizer.replay(ids)
    thoughts = _thoughts(opened, work, prompt, prompt_ids, formatted=constraint is not None)
    bound = _replay_in_thoughts(thoughts, constraint, ids, opened.vocab_size)
    report = _report(opened, work, prompt_ids, ids)
    sequence = Sequence(
        id=key[0],
        run_number=key[1],
        prompt=prompt_ids,
        options=options,
        seed=work.seed,
        max_tokens=max_tokens,
        ids=ids,
        read_alone=work.suspect,
        restore_at=_restore_at(whole.moved(prompt.restore_at), keep, removed),
        shift=shift,
        discarded=discarded,
        media=inside,
        owner=work.owner,
        images={span.image: whole.images[span.image] for span in inside},
        shared=work.shared,
        reported=max(1, _reported(work)) if options.prompt_alternatives >= 0 else 0,
    )
    facts = replace(facts, max_tokens=max_tokens)
    return Admit(sequence, facts, detokenizer, received, deadline, constraint, report, bound)


def _thoughts(
    opened: Opened, work: Work, prompt: Encoded, ids: tuple[int, ...], *, formatted: bool
) -> Thoughts | None:
    """Returns the Thoughts of the answer; None if neither a bound nor a format needs them.

    Raises BadRequest for a bound that cannot be enforced.
    """
    piece, most, source = opened.text.piece, work.options.thinking_budget, opened.source
    if most < 0 or source is None or not source.closings:
        return Thoughts(piece) if formatted and prompt.thinks else None
    if opened.no_format:
        raise BadRequest(f"thinking_budget is not supported: {opened.no_format}")
    closings = source.closings
    if not (isinstance(work.prompt, ChatPrompt) and work.prompt.tools):
        closings = closings[-1:]
    if formatted:
        return Thoughts(piece, most=most, closings=closings) if prompt.thinks else None
    name = (chat_format(source.templates.values()) or {})["thinking"] or ""
    end = b"".join(map(piece, ids[-MAX_MARK_TOKENS:])).decode("utf-8", "replace")
    inside = opens_thinking(end)
    return Thoughts(piece, MARKS[name], inside=inside, most=most, closings=closings)


def _replay_in_thoughts(
    thoughts: Thoughts | None, constraint: Constraint | None, ids: list[int], vocab_size: int
) -> ThoughtBound | None:
    """Replays the ids of a resume in `thoughts` and `constraint`, if the request has these.

    Returns the bound of the thoughts. Returns None if the request has a format (`constraint`), or
    if its answer has no thoughts.
    """
    if constraint is not None:
        if thoughts is not None:
            constraint.begin_in_thoughts(thoughts)
        constraint.replay(ids)
    elif thoughts is not None:
        bound = ThoughtBound(thoughts, vocab_size)
        bound.replay(ids)
        return bound
    return None


def _report(
    opened: Opened, work: Work, prompt: tuple[int, ...], ids: list[int]
) -> PromptReport | None:
    """Returns the report of the prompt that the run has to send; None: nothing to report.

    Raises BadRequest if a resume has ids before the whole prompt was reported.
    """
    reported, unseen = _reported(work), _unseen(opened, work, prompt)
    report = PromptReport.of(work.options, prompt, opened.text.piece, reported, unseen)
    if report is not None and ids and reported < len(prompt):
        raise BadRequest(
            f"resume has {len(ids)} ids, but only {reported} of {len(prompt)} prompt tokens were"
            " reported; all must be reported before the first id"
        )
    return report


def _reported(work: Work) -> int:
    """Returns the number of prompt tokens that earlier runs of the stream have reported."""
    return 0 if work.resume is None else work.resume.reported


def _unseen(opened: Opened, work: Work, prompt: tuple[int, ...]) -> int:
    """Returns the number of tokens that the tokenizer has added before the text of a prompt."""
    added = () if opened.source is None else tuple(opened.source.prefix)
    source = work.prompt
    is_text = isinstance(source, TextPrompt) or (
        isinstance(source, PackedPrompt) and source.key == "prompt"
    )
    return len(added) if is_text and prompt[: len(added)] == added else 0


def _require_known_thoughts(opened: Opened, work: Work, prompt: Encoded) -> None:
    """Raises BadRequest if it is not known where thoughts before a formatted answer end."""
    if not isinstance(work.prompt, ChatPrompt):
        return
    if answers_in_channels(opened):
        raise BadRequest("format is not supported in chats with models that answer in channels")
    if work.prompt.think and not prompt.thinks:
        raise BadRequest(
            "format with think is supported only if the chat template opens the thoughts, which"
            " the template of this model does not: leave `think` out"
        )


def answers_in_channels(opened: Opened) -> bool:
    """Returns whether the chat templates write thoughts and answers in channels."""
    templates = {} if opened.source is None else opened.source.templates
    return (chat_format(templates.values()) or {}).get("thinking") == "harmony"


def _inputs(opened: Opened, prompt: Encoded) -> Inputs:
    """Returns a prompt's inputs with its images. Raises BadRequest for an id without embedding."""
    ids = unpack_ids(prompt.packed)
    if not prompt.named:
        if opened.images is not None:
            check_ids_of_text(ids, opened.images.places)
        check_ids(ids, opened.vocab_size, "prompt")
        return Inputs(tuple(ids), (), {}, ())
    assert opened.images is not None
    places = opened.images.places
    check_ids([id for id in ids if id != places.slot_id], opened.vocab_size, "prompt")
    return with_images(ids, places, prompt.named, [*map(image_of, prompt.images)])


def _restore_at(place: int, keep: int, removed: int) -> int:
    """Returns the new position of the restore point `place` after tokens were removed.

    The prompt has lost `removed` tokens after its first `keep`. Returns 0 for a restore point among
    the removed tokens.
    """
    if not removed or place <= keep:
        return place
    return max(0, place - removed) if place > keep + removed else 0


def _facts(work: Work) -> Facts:
    """Returns the Facts (fixed values) of a resumed stream; empty Facts for a new stream."""
    return (None if work.resume is None else work.resume.facts) or Facts()


def _check_biases(opened: Opened, options: Options) -> None:
    bad = next((token for token in options.logit_bias if token >= opened.vocab_size), None)
    if bad is not None:
        raise BadRequest(f"logit_bias: token id {bad} is not below {opened.vocab_size}")


def _context(opened: Opened, first: Facts, options: Options) -> int:
    """Returns the context of a stream in tokens; a resumed stream keeps its first context.

    Raises BadRequest for a context that is too small, or larger than the model's.
    """
    if 0 < options.num_ctx < context_policy.MIN_CONTEXT:
        raise BadRequest(
            f"option num_ctx is {options.num_ctx}, must be at least {context_policy.MIN_CONTEXT},"
            " a token of the prompt and one of the completion, or 0 for the context of the model"
        )
    if options.num_ctx > opened.context:
        raise BadRequest(
            f"option num_ctx is {options.num_ctx}, the context of the model is {opened.context}"
        )
    if first.context is not None and first.context < context_policy.MIN_CONTEXT:
        raise BadRequest(
            f"resume.facts.context is {first.context}, must be at least"
            f" {context_policy.MIN_CONTEXT}: send the facts that came with the first delta"
        )
    if first.context is not None and first.context > opened.context:
        raise BadRequest(
            f"resume: the stream began with context {first.context},"
            f" this worker has {opened.context}"
        )
    if first.context is None:
        return options.num_ctx or opened.context
    return first.context


def _max_tokens(first: Facts, prompt: int, context: int, options: Options) -> int:
    """Returns the most ids of a completion, over all attempts.

    The first worker of a stream decides this bound. Raises BadRequest if the bound of a resume is
    not possible.
    """
    shift = options.shift
    if options.prompt_only:
        return 1  # one token is sampled, to end the prefill, and dropped
    if first.max_tokens is None:
        return context_policy.completion_tokens(options.max_tokens, prompt, context, shift=shift)
    limit = context_policy.completion_limit(prompt, context, shift=shift)
    if not 1 <= first.max_tokens <= limit:
        raise BadRequest(
            f"resume.facts.max_tokens is {first.max_tokens}, must be from 1 to {limit}:"
            " the ids that this prompt leaves room for"
        )
    return first.max_tokens


def _compare(first: Facts, own: Facts) -> None:
    """Raises BadRequest if the stream began with another model or another prompt."""
    for key, began, here in (
        ("digest", first.digest, own.digest),
        ("prompt_tokens", first.prompt_tokens, own.prompt_tokens),
        ("truncated", first.truncated, own.truncated),
        ("grammar", first.grammar, own.grammar),
    ):
        if began is not None and began != here:
            raise BadRequest(
                f"resume: the stream began with {key} {began!r:.80}, this worker has {here!r}"
            )
