"""A sequence: a request inside a worker. No I/O, no MLX, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct, field

from mlxpool.common.options import Options
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey, MediaSpan, is_slot, seen_images, without
from mlxpool.worker.scheduling.context_policy import ContextShift

MAX_RUN_TOKENS = 64  # tokens of a completion that a decode step reads together


class Phase(Enum):
    """The state of a sequence; the state advances, or returns to WAITING at a preemption."""

    WAITING = auto()
    RUNNING = auto()  # the sequence has a KV row
    FINISHED = auto()


class Sequence(Struct, eq=False):
    """One run of a request inside a worker: its prompt, completion and progress.

    Compared by identity, because two runs of a request may be in one worker. `prompt` is never
    empty. `ids` is the completion so far; in a resumed request it begins with the ids of earlier
    runs. `max_tokens` counts the ids of all runs.

    The stream is the prompt and the completion. The model reads inputs: the stream without the
    `discarded` tokens after the first `shift.keep`. Positions count inputs unless noted otherwise.
    In `prompt`, an image is a series of slots, which are numbers above all token ids, see
    media/spans.py. The last input of a stream is always a token.

    `reported`: the number of first tokens of the prompt with reported log-probabilities. 0: they
    are not requested. Otherwise it is at least 1, because the first token has no log-probability.
    """

    id: bytes
    run_number: int
    prompt: tuple[int, ...]
    options: Options
    seed: int
    max_tokens: int
    ids: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    submitted: int = 0  # first inputs whose keys and values are in the row or in a pass in flight
    awaited: int = 0  # tokens that passes in flight draw: they follow `ids`
    cached: int = 0  # the part of `submitted` that the prefix cache had at admission
    promised: int = 0  # the most blocks of the sequence when it runs alone, see block_manager.py
    preempted: bool = False  # the sequence was preempted
    read_alone: bool = False  # a pass or worker with it failed, so its prompt is read alone
    held: bool = False  # steps omit the sequence until the mask of its next token is known
    restore_at: int = 0  # tokens before the generation prompt, where a later prompt may branch off
    shift: ContextShift | None = None  # shifts at a full context; None: the sequence ends there
    discarded: int = 0  # tokens of the stream that shifts have removed from the inputs
    media: tuple[MediaSpan, ...] = ()  # the images among the inputs
    images: Mapping[ImageKey, PreparedImage] = field(default_factory=dict)  # images of `media`
    scored: tuple[int, ...] = ()  # tokens whose log-probabilities come with each drawn token
    shared: bool = False  # other sequences have this prompt: it is cached as soon as it is read
    awaits: Sequence | None = None  # waits for the prompt of this sequence, see shared_prompts.py
    reported: int = 0
    owner: str = ""  # the owner of the request
    looked_up: bool = False  # the prefix was requested from the disk tier
    restoring: bool = False  # the sequence waits for a read of the disk tier

    @property
    def tokens(self) -> list[int]:
        """Returns the inputs so far, as a new list."""
        return self.token_range(0, self.length)

    @property
    def length(self) -> int:
        """The number of inputs so far; the newest input may be unread."""
        return len(self.prompt) + len(self.ids) - self.discarded

    @property
    def prompt_inputs(self) -> int:
        """The number of inputs that are tokens of the prompt."""
        if self.shift is None or not self.discarded:
            return len(self.prompt)
        kept = min(self.shift.keep, len(self.prompt))
        return kept + max(0, len(self.prompt) - self.shift.keep - self.discarded)

    @property
    def lasting(self) -> list[int]:
        """Returns the inputs to cache for other sequences.

        After a context shift these are the kept inputs: no conversation continues the later inputs.
        For a sequence that only scores tokens, these are the inputs before its restore point.
        """
        if self.scored:
            return self.token_range(0, self.restore_at)
        if self.shift is None or not self.discarded:
            return self.tokens
        return self.token_range(0, self.shift.keep)

    @property
    def reports(self) -> bool:
        """Whether some log-probabilities of the prompt are not reported yet."""
        return 0 < self.reported < len(self.prompt)

    def reports_after(self, start: int, end: int) -> bool:
        """Returns whether the states of inputs [start, end) give log-probabilities of the prompt.

        The state of an input gives the log-probability of the next token.
        """
        return self.reports and end >= self.reported and start < len(self.prompt) - 1

    @property
    def cacheable(self) -> int:
        """The number of first inputs that may come from the prefix cache.

        The cache has no hidden states. So it cannot give inputs whose states are needed for
        log-probabilities of the prompt.
        """
        return self.reported - 1 if self.reports else self.length

    @property
    def shift_due(self) -> bool:
        """Whether there are more inputs than the context holds."""
        return self.shift is not None and self.length > self.shift.context

    @property
    def unread(self) -> int:
        """The number of known tokens that no pass has read, including a decode step's input."""
        return max(0, self.length - self.submitted)

    @property
    def has_unread(self) -> bool:
        """Whether `unread` is not 0; used for many sequences in every step."""
        return len(self.prompt) + len(self.ids) - self.discarded > self.submitted

    @property
    def reads_run(self) -> bool:
        """True if a decode step reads all unread tokens: several, but few, completion tokens.

        This happens after several tokens were appended together, or after a preemption.
        """
        unread = self.unread
        if not 1 < unread <= MAX_RUN_TOKENS or self.read_alone:
            return False
        return self.length - unread >= self.prompt_inputs

    @property
    def reads_prompt(self) -> bool:
        """Whether the sequence runs and has more unread inputs than a decode step reads."""
        return self.phase is Phase.RUNNING and self.unread > 1 and not self.reads_run

    def token_range(self, start: int, end: int) -> list[int]:
        """Returns `tokens[start:end]` without a list of all tokens; `end` is at most `length`."""
        if self.shift is None or not self.discarded:
            return self._stream_range(start, end)
        keep, gone = self.shift.keep, self.discarded
        rest = self._stream_range(max(start, keep) + gone, max(end, keep) + gone)
        return [*self._stream_range(start, min(end, keep)), *rest]

    def newest(self, count: int) -> list[int]:
        """Returns the last `count` tokens of the stream, or all tokens of a shorter stream.

        Discarded tokens are included, slots of images are not.
        """
        size = len(self.prompt) + len(self.ids)
        tokens = self._stream_range(max(0, size - count), size)
        return [token for token in tokens if not is_slot(token)] if self.has_slots else tokens

    @property
    def has_slots(self) -> bool:
        """Whether `prompt` has slots of images; context shifts may have discarded all slots.

        A stream resumed after such a shift has no `images`.
        """
        return bool(self.media) or (self.shift is not None and bool(self.shift.media))

    @property
    def next_image(self) -> MediaSpan | None:
        """The first image with unread inputs, or None."""
        return next((span for span in self.media if span.end > self.submitted), None)

    @property
    def needed_images(self) -> tuple[MediaSpan, ...]:
        """The images whose features the next pass needs.

        These are `next_image` and, with cross-attention, the images that the next input attends to.
        """
        images = seen_images(self.media, self.submitted)
        image = self.next_image
        return images if image is None or image in images else (*images, image)

    def _stream_range(self, start: int, end: int) -> list[int]:
        size = len(self.prompt)
        return [*self.prompt[start:end], *self.ids[max(start - size, 0) : max(end - size, 0)]]

    def return_to_waiting(self) -> None:
        """Makes the sequence wait for admission after it has lost its KV row."""
        self.phase = Phase.WAITING
        self.submitted = self.awaited = 0

    def preempt(self) -> None:
        """Makes the sequence wait for admission, because other sequences need its memory.

        See `return_to_waiting`.
        """
        self.return_to_waiting()
        self.preempted = True

    def shift_context(self) -> None:
        """Discards inputs of a full context; the kept inputs are read again, in a new KV row."""
        assert self.shift is not None
        before = self.discarded
        self.discarded = self.shift.discarded(len(self.prompt) + len(self.ids))
        self.media = without(self.media, self.shift.keep, self.discarded - before)
        self.preempt()


class TokenLogprob(Struct, frozen=True):
    """The log-probability of one sampled token (float32, from raw logits), with alternatives.

    The alternatives in `top` are the likeliest tokens, or the `scored` tokens of the sequence in
    their order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob) of the likeliest tokens, best first


class PromptLogprobs(Struct, frozen=True):
    """The log-probabilities of a prompt's tokens, from index `first` on."""

    sequence: Sequence
    first: int
    logprobs: tuple[TokenLogprob, ...]


class SampledToken(NamedTuple):
    """A token that a decode step sampled for one sequence. A tuple, because many are made."""

    sequence: Sequence
    token: int
    logprob: TokenLogprob | None = None


class SequenceFailed(Exception):
    """A pass failed for one sequence; the other sequences of the pass lost nothing."""

    def __init__(self, sequence: Sequence, message: str) -> None:
        super().__init__(message)
        self.sequence = sequence
