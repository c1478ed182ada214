"""The messages between the main thread and the compute thread, and the queue of deltas."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import NamedTuple

from msgspec import Struct

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.prompt_report import PromptReport
from mlxpool.worker.constraints.constraint import Constraint
from mlxpool.worker.constraints.thought_bound import ThoughtBound
from mlxpool.worker.decisions.answers import Answers, Path
from mlxpool.worker.encoders.inputs import EncoderInput
from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.scheduling.sequence import Sequence

MAX_UNTAKEN_STEPS = 256  # the most steps whose deltas wait for the main thread

RunKey = tuple[bytes, int]  # (request id, the broker's number of the run)


class CallKey(NamedTuple):
    """The id of a call, and its number, which is unique among the calls of this worker."""

    id: bytes
    number: int


# ---- to the compute thread ---------------------------------------------------------------------


class Admit(Struct, frozen=True):
    """Run a prepared sequence.

    `facts`: the values that stay the same in the whole stream; they are sent with the first delta.
    `detokenizer` and `constraint` have already processed the ids of a resume, whose text the client
    has. `constraint` None: the request has no format. `received` and `deadline` are monotonic
    seconds. `report`: reports the tokens of the prompt; None: the request does not ask for this.
    `bound`: bounds the tokens of the thoughts; None: no bound.
    """

    sequence: Sequence
    facts: Facts
    detokenizer: Detokenizer
    received: float
    deadline: float = math.inf
    constraint: Constraint | None = None
    report: PromptReport | None = None
    bound: ThoughtBound | None = None


class Drop(Struct, frozen=True):
    """Stop one run, which ends with the reason `cancelled`."""

    key: RunKey


class DropAll(Struct, frozen=True):
    """Drop every run, without deltas. Later messages to the main thread have the new `fence`."""

    fence: int


class HandBack(Struct, frozen=True):
    """Stop every run without a last delta; answered by `HandedBack`."""


class Compute(Struct, frozen=True):
    """Compute the inputs of a call with an encoder model; answered by `Answer`.

    `dimensions` (0: all) and `normalise` (None: the model's default) are parameters of `embed`.
    `first`: the number of the first input, for errors. `alone`: no pass joins these inputs with
    inputs of other calls.
    """

    key: CallKey
    inputs: Many[EncoderInput]
    owner: str = ""
    dimensions: int = 0
    normalise: bool | None = None
    first: int = 0
    alone: bool = False


class EncodedQuestion(Struct, frozen=True):
    """A question as token ids: its prompt and its answers.

    `branches`: the tokens that may follow at each branch of the answers.
    """

    prompt: tuple[int, ...]
    answers: Answers
    branches: Mapping[Path, tuple[int, ...]]


class Decide(Struct, frozen=True):
    """Compute the probabilities of answers with a model that generates text.

    Answered by `Answer`. The prompts begin with the same `shared` tokens. `temperature` divides the
    log-probabilities of the answers. `first`: the number of the first question, for errors.
    `alone`: no pass joins a question with other questions.
    """

    key: CallKey
    questions: Many[EncodedQuestion]
    shared: int
    owner: str = ""
    temperature: float = 1.0
    first: int = 0
    alone: bool = False


class DropCall(Struct, frozen=True):
    """Stop a call; no answer is sent."""

    key: CallKey


class Reserve(Struct, frozen=True):
    """Reserve `bytes` of the memory limit for the processes that prepare requests."""

    bytes: int


class MakeRoom(Struct, frozen=True):
    """Free `bytes` of prefixes, encoded images and cached buffers."""

    bytes: int


class DiskNews(Struct, frozen=True):
    """The disk tier of the prefix cache has read or written something."""


class SaveAll(Struct, frozen=True):
    """Stop all runs, and write prefixes to disk until the monotonic time `until` at the latest.

    The stopped runs get no last delta. `saved` is set when all prefixes are written, or at `until`.
    Then the process ends.
    """

    until: float
    saved: threading.Event


Inbound = (
    Admit
    | Drop
    | DropAll
    | HandBack
    | Compute
    | Decide
    | DropCall
    | Reserve
    | MakeRoom
    | DiskNews
    | SaveAll
)

# ---- to the main thread --------------------------------------------------------------------------


class Loaded(Struct, frozen=True):
    """The engine is ready for work; at most `max_sequences` run at the same time."""

    max_sequences: int


class Unusable(Struct, frozen=True):
    """The model cannot be served, or can no longer be served."""

    error: PoolError


class StepDeltas(Struct, frozen=True):
    """The deltas of one step: at most one delta with tokens for each sequence.

    `fence`: the number of connections to the broker that had been dropped when the deltas were
    made. If another connection was dropped since, the main thread does not send the deltas.
    """

    deltas: Many[Delta]
    fence: int = 0


class HandedBack(Struct, frozen=True):
    """Every run was stopped, as HandBack demands; no delta will follow."""

    fence: int = 0


class Answer(Struct, frozen=True):
    """The answer to a call."""

    key: CallKey
    content: CallAnswer


Outbound = Opened | OpenedEncoder | Loaded | Unusable | StepDeltas | HandedBack | Answer


class DeltaQueue:
    """The bounded queue of deltas from the compute thread to the main thread.

    When the deltas of MAX_UNTAKEN_STEPS steps wait, `put` blocks in the phase `blocked`. The main
    thread calls `acknowledge`; the compute thread calls all other methods. Each message has the
    fence of the newest `DropAll`, so that the main thread ignores older deltas.
    """

    def __init__(self, post: Callable[[Outbound], None], progress: Progress) -> None:
        self.fence = 0  # see StepDeltas
        self._post = post
        self._progress = progress
        self._slots = threading.Semaphore(MAX_UNTAKEN_STEPS)

    def put(self, deltas: list[Delta]) -> None:
        """Post the deltas of one step; empty deltas are not posted."""
        if not deltas:
            return
        if not self._slots.acquire(blocking=False):
            with self._progress.blocked():
                self._slots.acquire()
        self._post(StepDeltas(tuple(deltas), self.fence))

    def handed_back(self) -> None:
        """Answer `HandBack` after all deltas."""
        self._post(HandedBack(self.fence))

    def acknowledge(self) -> None:
        """Record that the main thread has taken one `StepDeltas`; then `put` can post another."""
        self._slots.release()
