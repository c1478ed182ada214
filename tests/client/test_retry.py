"""StreamRetry and SilenceTimer: when a stream is sent again or given up, with simulated times."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.client.retry import Action, Pace, SilenceTimer, StreamRetry
from mlxpool.client.stream import Delta, StreamState, parse_frame
from mlxpool.common.errors import BrokerLost, DuplicateId, PoolError, from_body
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds

ID = bytes(16)
PACE = Pace()
HEARD = math.inf  # the time of a frame that came just now


class Story:
    """Simulates a stream and its broker; `at` is the time in seconds."""

    def __init__(self, **given: Any) -> None:
        self.at = 10.0
        self.state = StreamState(ID)
        self.retry = StreamRetry(self.state, PACE, **given)
        self.retry.sent(self.at)

    def say(
        self, kind: str, body: dict[str, Any], *blobs: bytes, left: float | None = None, **head: int
    ) -> Delta | None:
        header = Header(kind, ID, 0, head.get("attempt", self.state.attempt), head.get("pos", 0))
        frame = parse_frame(Message(header, body, blobs))
        assert frame is not None
        return self.retry.receive(frame, self.at, left)

    def accepted(self, boot: int = 7, link: int = 3) -> None:
        self.say(kinds.ACCEPTED, {"boot": boot, "link": link, "seed": 42})
        self.retry.identified((boot, link), self.at)

    def token(self) -> None:
        pos = len(self.state.ids)
        assert self.say(kinds.DELTA, {"text": "x", "n": 1}, pack_ids([pos]), pos=pos) is not None

    def refused(self, code: str = "queue_full", left: float | None = None, **more: Any) -> None:
        self.say(kinds.ERROR, {"code": code, "message": "no", **more}, left=left)

    def tick(self, heard: float = HEARD, left: float | None = None) -> Action:
        """Performs the due action at once, as the connection does, and returns it."""
        step = self.retry.tick(self.at, heard, left)
        if step is Action.SEND:
            self.retry.sent_again(self.at)
        elif step is Action.CANCEL:
            self.retry.cancel_sent(self.at)
        return step

    def due_in(self) -> float:
        return self.retry.due - self.at


# ---- without an answer ---------------------------------------------------------------------------


def test_an_unanswered_request_is_sent_again_at_growing_intervals() -> None:
    story = Story()
    for attempt, wait in enumerate((2.0, 4.0, 8.0, 8.0), start=1):
        assert story.state.attempt == attempt and story.due_in() == wait
        story.at += wait - 0.25
        assert story.tick() is Action.NOTHING
        story.at += 0.25
        assert story.tick() is Action.SEND
    story.accepted()
    assert story.retry.due == math.inf


def test_nothing_is_sent_again_while_no_broker_is_heard() -> None:
    story = Story()
    sent_at = story.at
    story.at += 100
    assert story.tick(heard=sent_at - 1) is Action.NOTHING
    assert story.tick(heard=sent_at) is Action.SEND


def test_an_accepted_stream_waits_without_limit() -> None:
    story = Story()
    story.accepted()
    story.at += 1e6
    assert story.tick() is Action.NOTHING


# ---- lost connections and frames -----------------------------------------------------------------


@pytest.mark.parametrize(("home", "why"), [((8, 3), "restarted"), ((7, 4), "connection")])
def test_another_boot_or_link_than_the_streams_sends_it_again(
    home: tuple[int, int], why: str
) -> None:
    story = Story()
    story.accepted()
    story.retry.identified((7, 3), story.at)
    assert story.tick() is Action.NOTHING
    story.retry.identified(home, story.at)
    assert why in story.retry.why
    assert story.tick() is Action.SEND
    story.retry.identified(home, story.at)  # the request was just sent again
    assert story.tick() is Action.NOTHING and story.state.attempt == 2


def test_a_gap_is_sent_again_once() -> None:
    story = Story()
    story.accepted()
    story.token()
    for pos in (2, 3):
        assert story.say(kinds.DELTA, {"text": "x", "n": 1}, pack_ids([9]), pos=pos) is None
    assert story.tick() is Action.SEND
    assert story.tick() is Action.NOTHING
    assert (story.state.ids, story.state.attempt) == ([0], 2)


def test_retries_without_a_new_id_slow_down_until_an_id_comes() -> None:
    story = Story()
    for link, pause in enumerate((0.0, 0.0, 2.0, 4.0, 8.0, 8.0), start=3):
        story.accepted(link=link)
        story.retry.identified((7, link + 1), story.at)
        assert story.due_in() == pause
        story.at += pause
        assert story.tick() is Action.SEND
    story.accepted(link=20)
    story.token()
    story.retry.identified((7, 21), story.at)
    assert story.tick() is Action.SEND


def test_a_replaced_connection_sends_streams_again() -> None:
    story = Story()
    story.accepted()
    story.retry.reconnected(story.at)
    assert story.tick(heard=-math.inf) is Action.SEND
    story.retry.reconnected(story.at)
    assert story.tick(heard=-math.inf) is Action.SEND


@pytest.mark.parametrize("loss", ["boot", "link", "gap", "silence", "no answer"])
def test_a_stream_that_is_not_durable_ends(loss: str) -> None:
    story = Story(durable=False)
    if loss != "no answer":
        story.accepted()
    if loss == "gap":
        story.say(kinds.DELTA, {"text": "", "n": 0}, pos=4)
    elif loss == "silence":
        story.retry.reconnected(story.at)
    elif loss == "no answer":
        story.at += PACE.answer[-1]
    else:
        story.retry.identified((8 if loss == "boot" else 7, 4), story.at)
    assert story.tick() is Action.NOTHING
    assert isinstance(story.state.error, BrokerLost) and story.state.attempt == 1


# ---- errors that do not end a stream -------------------------------------------------------------


def test_a_refused_first_sending_ends_the_stream() -> None:
    story = Story()
    story.refused(retry_after_ms=5)
    assert story.state.over


def test_draining_puts_an_accepted_stream_off() -> None:
    story = Story()
    story.accepted()
    story.refused("draining", retry_after_ms=1500)
    assert not story.state.over and story.due_in() == 1.5
    story.at += 1.5
    assert story.tick(heard=-math.inf) is Action.SEND


@pytest.mark.parametrize(
    ("given", "code", "more"),
    [
        ({}, "draining", {}),
        ({}, "worker_lost", {"retry_after_ms": 5}),
        ({"durable": False}, "draining", {"retry_after_ms": 5}),
    ],
)
def test_errors_without_retry_after_end_the_stream(
    given: dict[str, Any], code: str, more: dict[str, Any]
) -> None:
    story = Story(**given)
    story.accepted()
    story.refused(code, **more)
    assert story.state.over


def test_a_refused_retry_is_repeated_until_broker_grace() -> None:
    story = Story()
    story.at += 2
    assert story.tick() is Action.SEND
    for _ in range(3):
        story.refused(retry_after_ms=20_000)
        assert story.due_in() == 20.0
        story.at += 20
        assert story.tick() is Action.SEND
    story.refused(retry_after_ms=20_000)
    assert story.state.over


@pytest.mark.parametrize("end", ["an id", "another broker"])
def test_an_id_or_another_boot_ends_a_row_of_refusals(end: str) -> None:
    story = Story()
    story.accepted()
    for boot in range(8, 20):
        story.refused("draining", retry_after_ms=20_000)
        story.at += 20
        assert story.tick() is Action.SEND
        story.accepted(boot=boot if end == "another broker" else 7)
        if end == "an id":
            story.token()


def test_a_deadline_limits_a_row_of_refusals() -> None:
    story = Story()
    story.accepted()
    story.refused("draining", left=100, retry_after_ms=90_000)
    story.at += 90
    assert story.tick(left=10) is Action.SEND
    story.refused("draining", left=10, retry_after_ms=10_001)
    assert story.state.over


def test_a_new_connection_does_not_shorten_retry_after() -> None:
    story = Story()
    story.accepted()
    story.refused("draining", retry_after_ms=5000)
    story.retry.reconnected(story.at)
    story.retry.identified((8, 1), story.at)
    assert story.due_in() == 5.0


# ---- duplicate ids -------------------------------------------------------------------------------


def about(code: str, attempt: int) -> tuple[PoolError, int]:
    return from_body({"code": code, "message": "m"}), attempt


def test_a_duplicate_id_counts_for_the_newest_sending_only() -> None:
    story = Story()
    story.at += 2
    story.tick()
    assert story.retry.error_of_sending(*about("duplicate_id", 1)) is None
    assert isinstance(story.retry.error_of_sending(*about("duplicate_id", 2)), DuplicateId)


def test_other_errors_of_sending_end_a_stream_only_before_it_was_accepted() -> None:
    story = Story()
    assert story.retry.error_of_sending(*about("bad_request", 0)) is not None
    assert story.retry.error_of_sending(*about("bad_request", 3)) is None
    story.accepted()
    assert story.retry.error_of_sending(*about("bad_request", 0)) is None


# ---- cancel --------------------------------------------------------------------------------------


def cancelled() -> Story:
    story = Story()
    story.accepted()
    story.retry.cancel_sent(story.at)
    return story


@pytest.mark.parametrize("loss", ["home", "silence", "no answer"])
def test_after_a_cancel_only_the_cancel_is_sent_again(loss: str) -> None:
    story = cancelled()
    if loss == "home":
        story.retry.identified((8, 1), story.at)
    elif loss == "silence":
        story.retry.reconnected(story.at)
    else:
        story.at += 2
    assert story.tick() is Action.CANCEL
    assert story.tick() is Action.NOTHING
    assert story.due_in() == 4.0
    story.retry.identified(story.retry.peer, story.at)
    assert story.tick() is Action.NOTHING


def test_a_gap_after_a_cancel_is_ignored() -> None:
    story = cancelled()
    story.say(kinds.DELTA, {"text": "", "n": 0}, pos=4)
    story.refused("draining", retry_after_ms=5)
    assert story.state.error is not None and story.state.attempt == 1


def test_the_fate_unknown_ends_a_cancelled_stream() -> None:
    story = cancelled()
    story.retry.fate("unknown", story.at)
    assert story.state.result is not None and story.state.result.reason == "cancelled"


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_lost_terminal_after_a_cancel(state: str) -> None:
    story = cancelled()
    story.retry.fate(state, story.at)
    story.at += 1.75
    assert story.tick() is Action.NOTHING and not story.state.over
    story.at += 0.25
    assert story.tick() is Action.NOTHING
    assert story.state.result is not None and story.state.result.reason == "cancelled"


def test_the_fate_of_a_live_request_waits_for_its_terminal() -> None:
    story = cancelled()
    story.retry.fate("streaming", story.at)
    story.at += 2
    assert story.tick() is Action.CANCEL
    story.say(kinds.DONE, {"text": "", "reason": "stop"})
    assert story.state.result is not None and story.state.result.reason == "stop"


def test_a_fate_without_a_cancel_is_ignored() -> None:
    story = Story()
    story.accepted()
    story.retry.fate("unknown", story.at)
    assert not story.state.over


# ---- the deadline --------------------------------------------------------------------------------


def test_after_the_deadline_a_stream_is_given_up_and_not_sent_again() -> None:
    story = Story()
    story.at += 5
    assert story.tick(left=-0.1) is Action.NOTHING
    story.at += 0.75
    assert story.tick(left=-1.0) is Action.NOTHING
    story.at += 0.25
    assert story.tick(left=-1.1) is Action.GIVE_UP


# ---- the timer -----------------------------------------------------------------------------------


def run(timer: SilenceTimer, wall: float, seconds: float) -> float:
    """Advances the timer from the monotonic time `wall`, in the steps of a healthy loop.

    Returns the monotonic time after `seconds`.
    """
    for _ in range(round(seconds / 0.25)):
        wall += 0.25
        timer.advance(wall)
    return wall


def test_silence_replaces_the_connection_at_growing_intervals() -> None:
    timer = SilenceTimer(PACE, 100.0)
    wall = run(timer, 100.0, 1)
    timer.heard()
    for wait in (3.0, 4.0, 8.0, 8.0):
        wall = run(timer, wall, wait - 0.25)
        assert not timer.reconnect_due
        wall = run(timer, wall, 0.25)
        assert timer.reconnect_due
        timer.reconnected()
    assert timer.silent == 23.0 and not timer.lost
    wall = run(timer, wall, 37.25)
    assert timer.lost
    timer.heard()
    assert not timer.lost and not timer.reconnect_due and timer.reconnects == 0


def test_a_broker_never_heard_is_given_up_sooner() -> None:
    timer = SilenceTimer(PACE, 0.0)
    wall = run(timer, 0.0, 5)
    assert not timer.lost
    run(timer, wall, 0.25)
    assert timer.lost


def test_time_while_the_process_was_stopped_does_not_count() -> None:
    timer = SilenceTimer(PACE, 0.0)
    timer.heard()
    wall = run(timer, 0.0, 2)
    timer.advance(wall + 3600)
    assert timer.silent == 2.0 + PACE.gap and not timer.reconnect_due and not timer.lost


def test_a_clock_that_goes_back_adds_no_time() -> None:
    timer = SilenceTimer(PACE, 100.0)
    timer.advance(50.0)
    assert timer.now == 0.0


def test_time_without_open_streams_is_no_silence() -> None:
    timer = SilenceTimer(PACE, 0.0)
    run(timer, 0.0, 100)
    timer.reset()
    assert timer.silent == 0.0 and not timer.lost and timer.heard_at == -math.inf


def test_a_broker_that_takes_no_connection_is_given_up_earlier() -> None:
    pace = replace(PACE, connect_grace=5.0, handshake_grace=1.0)

    def after(seconds: float, **state: Any) -> bool:
        timer = SilenceTimer(pace, 0.0)
        for name, value in state.items():
            setattr(timer, name, value)
        timer.now = seconds
        return timer.lost

    assert not after(0.9) and after(1.1)
    assert not after(4.9, connected=True) and after(5.1, connected=True)
    assert not after(pace.broker_grace - 1, heard_at=0.0)
