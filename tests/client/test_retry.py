"""When a stream is sent again and when it is given up, with made-up times."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxpool.client.retry import Action, Pace, SilenceTimer, StreamRetry
from mlxpool.client.stream import Delta, StreamState, parse_frame
from mlxpool.common.errors import BrokerLost, DuplicateId, PoolError, from_body
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.token_ids import pack_ids

ID = bytes(16)
PACE = Pace()
HEARD = math.inf  # "a frame came just now"


class Story:
    """A stream and its broker; `at` is the time."""

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
        """What is due now; done at once, as the link does it."""
        step = self.retry.tick(self.at, heard, left)
        if step is Action.SEND:
            self.retry.sent_again(self.at)
        elif step is Action.CANCEL:
            self.retry.cancel_sent(self.at)
        return step

    def due_in(self) -> float:
        return self.retry.due - self.at


# ---- unanswered ----------------------------------------------------------------------------------


def test_a_sending_without_an_answer_is_repeated_ever_later() -> None:
    story = Story()
    for attempt, wait in enumerate((2.0, 4.0, 8.0, 8.0), start=1):
        assert story.state.attempt == attempt and story.due_in() == wait
        story.at += wait - 0.25
        assert story.tick() is Action.NOTHING
        story.at += 0.25
        assert story.tick() is Action.SEND
    story.accepted()
    assert story.retry.due == math.inf


def test_nobody_there_is_no_reason_to_send_into_the_dark() -> None:
    story = Story()
    sent_at = story.at
    story.at += 100
    assert story.tick(heard=sent_at - 1) is Action.NOTHING
    assert story.tick(heard=sent_at) is Action.SEND


def test_what_was_accepted_waits_for_as_long_as_it_takes() -> None:
    story = Story()
    story.accepted()
    story.at += 1e6
    assert story.tick() is Action.NOTHING


# ---- lost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("home", "why"), [((8, 3), "restarted"), ((7, 4), "connection")])
def test_another_home_than_the_streams(home: tuple[int, int], why: str) -> None:
    story = Story()
    story.accepted()
    story.retry.identified((7, 3), story.at)
    assert story.tick() is Action.NOTHING
    story.retry.identified(home, story.at)
    assert why in story.retry.why
    assert story.tick() is Action.SEND
    story.retry.identified(home, story.at)  # the new sending is under way
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


def test_sendings_that_bring_nothing_slow_down_and_an_id_makes_them_quick_again() -> None:
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


def test_a_new_connection_of_ours_sends_again() -> None:
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


# ---- errors that are no end ----------------------------------------------------------------------


def test_a_first_sending_is_refused_for_good() -> None:
    story = Story()
    story.refused(retry_after_ms=5)
    assert story.state.over


def test_a_broker_that_drains_is_asked_again() -> None:
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
def test_other_errors_are_the_end(given: dict[str, Any], code: str, more: dict[str, Any]) -> None:
    story = Story(**given)
    story.accepted()
    story.refused(code, **more)
    assert story.state.over


def test_a_later_sending_comes_back_until_the_grace_is_over() -> None:
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
def test_what_ends_a_row_of_refusals(end: str) -> None:
    story = Story()
    story.accepted()
    for boot in range(8, 20):
        story.refused("draining", retry_after_ms=20_000)
        story.at += 20
        assert story.tick() is Action.SEND
        story.accepted(boot=boot if end == "another broker" else 7)
        if end == "an id":
            story.token()


def test_a_deadline_ends_a_row_of_refusals() -> None:
    story = Story()
    story.accepted()
    story.refused("draining", left=100, retry_after_ms=90_000)
    story.at += 90
    assert story.tick(left=10) is Action.SEND
    story.refused("draining", left=10, retry_after_ms=10_001)
    assert story.state.over


def test_a_refusal_is_waited_for_even_when_the_connection_changes() -> None:
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


def test_other_errors_about_a_stream_end_it_only_before_it_was_accepted() -> None:
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
def test_a_cancel_is_sent_again_and_never_the_stream(loss: str) -> None:
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


def test_a_gap_after_a_cancel_changes_nothing() -> None:
    story = cancelled()
    story.say(kinds.DELTA, {"text": "", "n": 0}, pos=4)
    story.refused("draining", retry_after_ms=5)
    assert story.state.error is not None and story.state.attempt == 1


def test_a_stream_that_nobody_knows_is_cancelled() -> None:
    story = cancelled()
    story.retry.fate("unknown", story.at)
    assert story.state.result is not None and story.state.result.reason == "cancelled"


@pytest.mark.parametrize("state", ["done", "failed", "cancelled"])
def test_a_terminal_that_was_lost(state: str) -> None:
    story = cancelled()
    story.retry.fate(state, story.at)
    story.at += 1.75
    assert story.tick() is Action.NOTHING and not story.state.over
    story.at += 0.25
    assert story.tick() is Action.NOTHING
    assert story.state.result is not None and story.state.result.reason == "cancelled"


def test_a_live_fate_waits_for_the_terminal() -> None:
    story = cancelled()
    story.retry.fate("streaming", story.at)
    story.at += 2
    assert story.tick() is Action.CANCEL
    story.say(kinds.DONE, {"text": "", "reason": "stop"})
    assert story.state.result is not None and story.state.result.reason == "stop"


def test_somebody_elses_fate_is_not_ours() -> None:
    story = Story()
    story.accepted()
    story.retry.fate("unknown", story.at)
    assert not story.state.over


# ---- the deadline --------------------------------------------------------------------------------


def test_after_the_deadline_it_is_not_sent_and_soon_given_up() -> None:
    story = Story()
    story.at += 5
    assert story.tick(left=-0.1) is Action.NOTHING
    story.at += 0.75
    assert story.tick(left=-1.0) is Action.NOTHING
    story.at += 0.25
    assert story.tick(left=-1.1) is Action.GIVE_UP


# ---- the timer -----------------------------------------------------------------------------------


def run(timer: SilenceTimer, wall: float, seconds: float) -> float:
    """Turn as a healthy loop does; returns the wall's time."""
    for _ in range(round(seconds / 0.25)):
        wall += 0.25
        timer.advance(wall)
    return wall


def test_silence_moves_the_connection_ever_later() -> None:
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


def test_what_was_never_heard_is_given_up_sooner() -> None:
    timer = SilenceTimer(PACE, 0.0)
    wall = run(timer, 0.0, 5)
    assert not timer.lost
    run(timer, wall, 0.25)
    assert timer.lost


def test_time_in_which_we_did_not_run_is_no_silence() -> None:
    timer = SilenceTimer(PACE, 0.0)
    timer.heard()
    wall = run(timer, 0.0, 2)
    timer.advance(wall + 3600)
    assert timer.silent == 2.0 + PACE.gap and not timer.reconnect_due and not timer.lost


def test_a_clock_that_goes_back_stands_still() -> None:
    timer = SilenceTimer(PACE, 100.0)
    timer.advance(50.0)
    assert timer.now == 0.0


def test_nothing_waited_for_is_no_silence() -> None:
    timer = SilenceTimer(PACE, 0.0)
    run(timer, 0.0, 100)
    timer.reset()
    assert timer.silent == 0.0 and not timer.lost and timer.heard_at == -math.inf
