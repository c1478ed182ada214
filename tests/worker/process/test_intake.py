"""The table of runs and calls: preparation, computation, answers, cancels, return to the broker."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Content, Header, Message
from mlxpool.common.protocol.from_worker import CallAnswer, Credit, PromptSizes, Yield
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.common.trace import History
from mlxpool.worker.compute.messages import (
    Admit,
    Answer,
    CallKey,
    Compute,
    Drop,
    DropAll,
    DropCall,
    HandBack,
    Inbound,
)
from mlxpool.worker.encoders.text import EncoderTextSource, OpenedEncoder
from mlxpool.worker.engine.counting_engine import CountingText
from mlxpool.worker.preparation.errors import CANCELLED
from mlxpool.worker.preparation.jobs import Checked, CheckFormat, Result, perform
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.preparation.service import Deliver, Load
from mlxpool.worker.process.intake import Intake, Prepared, State
from mlxpool.worker.process.link import Link
from mlxpool.worker.prompt.text_model import Opened
from support import kinds
from support.constrained_answers import demo
from support.worker_process import id_of

TEXT = CountingText()
COUNTING = Opened("digest", 32, 300, TEXT)
ENCODER = OpenedEncoder("digest", 32, 300, frozenset({"embed"}), EncoderTextSource("", "", 32, 300))


class Sent(Link):
    """A link that records the messages sent on it."""

    def __init__(self) -> None:
        self.messages: list[Content] = []
        self.answers: dict[bytes | None, CallAnswer] = {}
        self.deltas: list[Delta] = []

    def send(self, content: Content, id: bytes | None = None) -> None:
        if isinstance(content, CallAnswer):
            assert id not in self.answers
            self.answers[id] = content
        else:
            self.messages.append(content)

    def send_deltas(self, deltas: Sequence[Delta]) -> None:
        self.deltas += deltas

    def ends(self) -> dict[int, Any]:
        """Returns each ended request's reason or error message, by the request's number."""
        return {
            delta.id[0]: delta.end.get("reason", delta.end.get("message"))
            for delta in self.deltas
            if delta.end is not None
        }


class Jobs:
    """A service that performs the submitted jobs only when `perform` is called."""

    load = Load()

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self.waiting: dict[Hashable, Waiting] = {}

    def start(self) -> None: ...

    def submit(self, waiting: Waiting) -> None:
        self.waiting[waiting.key] = waiting

    def submit_result(self, key: Hashable, result: Result) -> None:
        self.deliver(key, result)

    def cancel(self, key: Hashable) -> None:
        if self.waiting.pop(key, None):
            self.deliver(key, CANCELLED)

    def cancel_all(self) -> None:
        """Keeps the jobs, as a service does whose results are already on their way."""

    def perform(self) -> None:
        """Performs the waiting jobs and delivers their results."""
        while self.waiting:
            key = next(iter(self.waiting))
            self.deliver(key, perform(TEXT, self.waiting.pop(key).job))


class Harness:
    """An intake between a broker and a compute thread that do nothing."""

    def __init__(self, opened: Opened | OpenedEncoder = COUNTING) -> None:
        self.link = Sent()
        self.computed: list[Inbound] = []
        self.posted: list[Prepared] = []

        def make_jobs(opened: object, deliver: Deliver) -> Jobs:
            self.jobs = Jobs(deliver)
            return self.jobs

        self.intake = Intake(
            self.link, self.compute, self.posted.append, History("test", ""), make_jobs
        )
        self.intake.opened(opened)
        self.intake.loaded(4)

    def compute(self, message: Inbound) -> None:
        """Records a message to the compute thread; a prompt's size must have been sent before."""
        if isinstance(message, Admit):
            sequence = message.sequence
            size = (sequence.id, sequence.run_number, len(sequence.prompt))
            assert self.link.messages[-1] == PromptSizes([size])
        self.computed.append(message)

    def work(self, number: int, *blobs: bytes, **body: Any) -> None:
        header = Header(kinds.WORK, id_of(number), attempt=1)
        self.intake.begin(Message(header, {"prompt": "abc", **body}, blobs))

    def call(self, number: int, kind: str, *blobs: bytes, **body: Any) -> None:
        self.intake.begin(Message(Header(kind, id_of(number)), body, blobs))

    def prepared(self) -> list[Inbound]:
        """Performs the waiting jobs. Returns the resulting messages to the compute thread."""
        before = len(self.computed)
        self.jobs.perform()
        self.take()
        return self.computed[before:]

    def take(self) -> None:
        """Handles the posted results of preparations."""
        while self.posted:
            self.intake.prepared(self.posted.pop(0))

    @property
    def credit(self) -> int:
        """The number of sequences in the newest Credit message to the broker."""
        return next(
            message for message in reversed(self.link.messages) if isinstance(message, Credit)
        ).sequences


def test_requests_end_alone_and_with_their_own_errors() -> None:
    harness = Harness()
    harness.work(1)
    harness.work(2, messages=[5], prompt=None)
    harness.work(3, resume={"facts": {"digest": "x"}})
    harness.call(4, kinds.TOKENIZE, model="m", text="ab")
    harness.call(5, kinds.TOKENIZE, b"\xff", model="m", text=True)
    harness.call(6, kinds.DETOKENIZE, pack_ids([1, 2]), model="m")
    harness.call(7, kinds.DETOKENIZE, b"abc", model="m")
    harness.call(8, kinds.TOKENIZE, model="m")
    (admit,) = harness.prepared()
    assert isinstance(admit, Admit) and admit.sequence.prompt == (97, 98, 99)
    ends = harness.link.ends()
    assert set(ends) == {2, 3} and "messages[0] must be a map" in ends[2] and "digest" in ends[3]
    answers = {id[0]: answer for id, answer in harness.link.answers.items() if id is not None}
    assert set(answers) == {4, 5, 6, 7, 8}
    assert unpack_ids(answers[4].packed[0]) == [97, 98]
    assert answers[6].fields == {"text": "1 2 "}
    for number in (5, 7, 8):
        assert answers[number].fields["code"] == "bad_request"
    assert harness.credit == 3 and len(harness.intake.tasks) == 1


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ({"count": 1, "facts": {"digest": "other"}}, "digest"),
        ({"count": 1, "facts": {"now": "noon"}}, "now"),
        ({"count": -1}, "count"),
        ({"count": "many"}, "count"),
        (5, "resume"),
    ],
)
def test_a_malformed_resume_ends_its_own_run(resume: Any, words: str) -> None:
    harness = Harness()
    harness.work(1, pack_ids([5]), resume=resume)
    harness.work(2)
    (admit,) = harness.prepared()
    assert isinstance(admit, Admit) and admit.sequence.id == id_of(2)
    ends = harness.link.ends()
    assert set(ends) == {1} and words in ends[1]


@pytest.mark.parametrize(
    ("opened", "kind", "body", "words"),
    [
        (COUNTING, kinds.EMBED, {"inputs": ["a"]}, "generates text"),
        (COUNTING, kinds.DECIDE, {"prompt": "a", "questions": [{"question": "?"}]}, "counts"),
        (ENCODER, kinds.DECIDE, {"prompt": "a", "questions": [{"question": "?"}]}, "embed, rerank"),
        (ENCODER, kinds.RERANK, {"query": "a", "documents": ["b"]}, "it is a model for embed"),
    ],
)
def test_a_model_refuses_what_it_does_not_do(
    opened: Opened | OpenedEncoder, kind: str, body: dict[str, Any], words: str
) -> None:
    harness = Harness(opened)
    harness.call(1, kind, **body)
    assert words in harness.link.answers[id_of(1)].fields["message"]
    if opened is ENCODER:
        harness.work(2)
        assert "does not generate text" in harness.link.ends()[2]
    assert not harness.intake.tasks and not harness.prepared()


def test_inputs_that_are_token_ids_need_no_preparation() -> None:
    harness = Harness(ENCODER)
    harness.call(1, kinds.EMBED, pack_ids([1, 2]), tokens=[2])
    (compute,) = harness.computed
    assert isinstance(compute, Compute) and [item.ids for item in compute.inputs] == [(1, 2)]
    harness.intake.cancel((id_of(1), 0))
    assert harness.computed[1:] == [DropCall(compute.key)] and not harness.intake.tasks


def test_a_cancelled_call_is_not_answered_and_the_next_with_its_id_is() -> None:
    harness = Harness(ENCODER)
    for _ in range(2):
        harness.call(1, kinds.EMBED, pack_ids([1, 2]), tokens=[2])
        harness.intake.cancel((id_of(1), 0))
        harness.intake.cancel((id_of(1), 0))
        harness.call(1, kinds.TOKENIZE, text="a")
        harness.intake.cancel((id_of(1), 0))
        assert not harness.jobs.waiting
    harness.call(1, kinds.EMBED, pack_ids([1, 2]), tokens=[2])
    computed = [command for command in harness.computed if isinstance(command, Compute)]
    assert len({compute.key for compute in computed}) == 3
    for number, compute in enumerate(computed):
        for _ in range(2):
            harness.intake.answered(Answer(compute.key, CallAnswer({"text": str(number)})))
    assert not harness.prepared()
    assert harness.link.answers == {id_of(1): CallAnswer({"text": "2"})}


def test_what_an_older_connection_brought_is_forgotten() -> None:
    """Runs and calls of an older connection are dropped: another worker computes them by now.

    Otherwise they would keep sequences for ever.
    """
    harness = Harness()
    harness.work(1)
    harness.call(2, kinds.TOKENIZE, text="a")
    harness.work(3)
    first = harness.prepared()
    harness.work(4)
    old = dict(harness.jobs.waiting)
    fence = harness.intake.fence
    harness.intake.drop_all()
    assert len(first) == 2 and harness.computed[2:] == [DropAll(fence + 1)]
    assert harness.intake.fence == fence + 1 and not harness.intake.tasks
    harness.work(4)  # as if a broker used the number again
    (new,) = harness.intake.tasks.values()
    for key, waiting in old.items():
        harness.jobs.deliver(key, perform(TEXT, waiting.job))
        harness.intake.prepared(Prepared(key, CallAnswer({})))  # type: ignore[arg-type]
    harness.intake.answered(Answer(CallKey(id_of(2), 0), CallAnswer({})))
    assert not harness.posted and harness.intake.tasks == {new.name: new}
    (admit,) = harness.prepared()
    assert isinstance(admit, Admit) and new.state is State.COMPUTING


def test_a_cancelled_run_keeps_its_place_until_its_preparation_has_ended() -> None:
    harness = Harness()
    harness.work(1)
    harness.work(2)
    harness.intake.cancel((id_of(1), 1))
    assert harness.intake.preparing == 2 and not harness.link.ends()
    (admit,) = harness.prepared()
    assert isinstance(admit, Admit) and harness.link.ends() == {1: "cancelled"}
    assert harness.credit == 3
    harness.intake.cancel((id_of(2), 1))
    assert harness.computed[-1] == Drop((id_of(2), 1)) and len(harness.intake.tasks) == 1


def test_a_run_that_is_cancelled_between_two_jobs_begins_no_further_one() -> None:
    """The run is cancelled after the check of its format and before the job of its prompt."""
    folder, text, table = demo()
    opened = Opened("digest", 64, folder.plan.vocab_size, table, text.source, folder.eos_ids)
    harness = Harness(opened)
    harness.work(1, options={"format": {"type": "choice", "choices": ["a", "b"]}})
    ((run, check),) = harness.jobs.waiting.items()
    assert isinstance(check.job, CheckFormat)
    harness.jobs.waiting.clear()
    harness.intake.cancel((id_of(1), 1))
    harness.jobs.deliver(run, Checked())
    assert not harness.jobs.waiting
    harness.take()
    assert harness.link.ends() == {1: "cancelled"} and not harness.intake.tasks


def test_a_drain_ends_cancelled_runs_and_hands_the_others_back() -> None:
    harness = Harness()
    harness.work(1)
    harness.prepared()
    harness.work(2)
    harness.intake.cancel((id_of(2), 1))
    harness.work(3)
    harness.call(4, kinds.TOKENIZE, text="a")
    for _ in range(2):
        harness.intake.drain()
    assert [command for command in harness.computed if isinstance(command, HandBack)] == [
        HandBack()
    ]
    harness.intake.handed_back()
    assert harness.link.ends() == {2: "cancelled"} and harness.credit == 0
    handed = Yield([(id_of(1), 1), (id_of(3), 1)])
    assert [message for message in harness.link.messages if isinstance(message, Yield)] == [handed]
    assert not [result for result in harness.prepared() if isinstance(result, Admit)]
    assert list(harness.link.answers) == [id_of(4)] and not harness.intake.tasks
    harness.work(5)
    assert harness.link.messages[-2] == Yield([(id_of(5), 1)])


def test_a_drain_without_runs_sends_credit_0_only() -> None:
    harness = Harness()
    harness.link.messages.clear()
    harness.intake.drain()
    harness.intake.handed_back()
    assert harness.link.messages == [Credit(0, 0)]


def test_an_error_of_the_service_is_that_of_the_request() -> None:
    harness = Harness()
    harness.work(1)
    harness.call(2, kinds.TOKENIZE, text="a")
    for key in list(harness.jobs.waiting):
        harness.jobs.deliver(key, PoolError("no lane"))
    harness.take()
    assert harness.link.ends() == {1: "no lane"}
    assert harness.link.answers[id_of(2)].fields["message"] == "no lane"
