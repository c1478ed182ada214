"""StreamState makes deltas and the end of a stream from frames."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.client.stream import Delta, Frame, StreamState, parse_frame
from mlxpool.common.errors import ContextExceeded, Internal
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds

ID = bytes(16)
ACCEPTED = {"boot": 7, "link": 3, "queue_position": 0, "seed": 42}
DONE = {
    "text": "",
    "reason": "stop",
    "usage": {"completion_tokens": 2},
    "timings_ms": {"total": 1.5},
    "attempts": 2,
}


def frame(
    kind: str, body: dict[str, Any] | None = None, *blobs: bytes, pos: int = 0, attempt: int = 1
) -> Frame:
    parsed = parse_frame(Message(Header(kind, ID, 7, attempt, pos), body or {}, blobs))
    assert parsed is not None
    return parsed


def delta(pos: int, *ids: int, text: str = "", attempt: int = 1, **body: Any) -> Frame:
    fields = {"text": text, "n": len(ids), **body}
    return frame(kinds.DELTA, fields, pack_ids(ids), pos=pos, attempt=attempt)


def accepted() -> StreamState:
    state = StreamState(ID)
    assert state.receive(frame(kinds.ACCEPTED, ACCEPTED)) is None
    return state


def test_accepted() -> None:
    state = accepted()
    assert (state.boot, state.link, state.seed, state.over) == (7, 3, 42, False)


def test_the_result_has_the_warnings_of_the_broker() -> None:
    state = StreamState(ID)
    state.receive(frame(kinds.ACCEPTED, {**ACCEPTED, "warnings": ["the unknown key 'x'"]}))
    state.receive(frame(kinds.DONE, DONE, pos=0))
    assert state.whole().warnings == ("the unknown key 'x'",)


def test_deltas_in_order() -> None:
    state = accepted()
    assert state.receive(delta(0, 5, 6, text="ab")) == Delta("ab", (5, 6), 0)
    assert state.receive(delta(2, 7)) == Delta("", (7,), 2)
    assert state.ids == [5, 6, 7]


def test_done_holds_the_whole_completion() -> None:
    state = accepted()
    state.receive(delta(0, 5, text="a", logprobs=[{"logprob": -1}], facts={"now": 3}))
    state.receive(delta(1, 6, text="b"))
    assert state.receive(frame(kinds.DONE, DONE, pos=2)) is None
    result = state.result
    assert state.over and result is not None
    assert (result.text, result.ids, result.reason) == ("ab", (5, 6), "stop")
    assert (result.usage, result.timings_ms) == (DONE["usage"], DONE["timings_ms"])
    assert (result.seed, result.attempts) == (42, 2)
    assert result.logprobs == ({"logprob": -1},)
    assert state.facts is not None and state.facts.raw == {"now": 3}


def test_held_back_text_comes_with_the_end() -> None:
    state = accepted()
    state.receive(delta(0, 5, text="a"))
    assert state.receive(frame(kinds.DONE, {**DONE, "text": "z"}, pos=1)) == Delta("z", (), 1)
    assert state.result is not None and state.result.text == "az"


@pytest.mark.parametrize("pos", [0, 2, 9])
def test_a_gap_or_a_repetition_is_not_appended(pos: int) -> None:
    state = accepted()
    state.receive(delta(0, 5))
    assert state.receive(delta(pos, 6)) is None
    assert state.gap == f"a frame begins at token {pos}, 1 were received"
    assert state.ids == [5] and not state.over


def test_a_frame_without_all_its_ids_is_a_gap() -> None:
    state = accepted()
    assert state.receive(delta(0, 5, n=2)) is None
    assert state.gap and state.ids == []


def test_a_done_with_another_position_is_a_gap() -> None:
    state = accepted()
    state.receive(delta(0, 5))
    state.receive(frame(kinds.DONE, DONE, pos=2))
    assert state.gap and not state.over


def test_deltas_before_accepted_are_ignored() -> None:
    state = StreamState(ID)
    assert state.receive(delta(0, 5)) is None
    state.receive(frame(kinds.DONE, DONE))
    assert state.ids == [] and not state.over and not state.gap


def test_a_stream_continues_in_the_next_attempt() -> None:
    state = accepted()
    state.receive(delta(0, 5, text="a", facts={"now": 3}))
    state.receive(delta(2, 9))
    state.begin_attempt()
    assert (state.attempt, state.accepted, state.gap) == (2, False, "")
    assert state.receive(delta(1, 6, text="b")) is None
    assert state.receive(delta(1, 6, text="b", attempt=2)) is None
    state.receive(frame(kinds.ACCEPTED, ACCEPTED, attempt=2))
    assert state.receive(delta(1, 6, text="b", attempt=2, facts={"now": 4})) is not None
    state.receive(frame(kinds.DONE, DONE, pos=2, attempt=2))
    assert state.result is not None
    assert (state.result.text, state.result.ids) == ("ab", (5, 6))
    assert state.facts is not None and state.facts.raw == {"now": 3}


def test_boots_that_sent_no_id_are_counted() -> None:
    state = accepted()
    for attempt, boot, counted in ((2, 8, 1), (3, 8, 1), (4, 9, 2)):
        state.begin_attempt()
        state.receive(frame(kinds.ACCEPTED, {**ACCEPTED, "boot": boot}, attempt=attempt))
        assert state.barren_boots == counted
    state.receive(delta(0, 5, attempt=4))
    assert state.barren_boots == 0


def test_another_seed_ends_the_stream() -> None:
    state = accepted()
    state.receive(delta(0, 5))
    state.begin_attempt()
    state.receive(frame(kinds.ACCEPTED, {**ACCEPTED, "seed": 43}, attempt=2))
    assert isinstance(state.error, Internal) and "seed 42" in state.error.message


def test_cancel_without_a_terminal() -> None:
    state = accepted()
    state.receive(delta(0, 5, text="a", facts={"prompt_tokens": 3}))
    state.cancel_here()
    assert state.result is not None
    assert (state.result.reason, state.result.text, state.result.ids) == ("cancelled", "a", (5,))
    usage = {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 1, "total_tokens": 4}
    assert state.result.usage == usage


def test_frames_of_another_attempt_are_ignored() -> None:
    state = accepted()
    for strange in (
        delta(0, 9, attempt=2),
        frame(kinds.DONE, DONE, attempt=3),
        frame(kinds.ERROR, {"code": "internal", "message": "x"}, attempt=2),
        frame(kinds.ACCEPTED, {**ACCEPTED, "boot": 8}, attempt=2),
    ):
        assert state.receive(strange) is None
    assert not state.over and state.ids == [] and state.boot == 7


def test_an_error_is_typed() -> None:
    state = accepted()
    state.receive(delta(0, 5))
    state.receive(frame(kinds.ERROR, {"code": "context_exceeded", "message": "why"}, pos=1))
    assert isinstance(state.error, ContextExceeded)
    assert state.over and state.result is None


def test_nothing_counts_after_the_end() -> None:
    state = accepted()
    state.receive(frame(kinds.DONE, DONE))
    result = state.result
    for late in (delta(0, 5), frame(kinds.ERROR, {"code": "internal"}), frame(kinds.DONE, DONE)):
        assert state.receive(late) is None
    assert state.result is result and state.error is None and state.ids == []


def test_unknown_kinds_are_ignored() -> None:
    assert parse_frame(Message(Header("news", ID, 7, 1, 0), {"a": 1})) is None


@given(st.lists(st.integers(0, 5), max_size=20))
def test_the_result_does_not_depend_on_how_frames_are_divided(cuts: list[int]) -> None:
    state, pos = accepted(), 0
    for count in cuts:
        ids = range(pos, pos + count)
        got = state.receive(delta(pos, *ids, text="x" * count))
        assert got == Delta("x" * count, tuple(ids), pos)
        pos += count
    state.receive(frame(kinds.DONE, DONE, pos=pos))
    assert state.result is not None
    assert state.result.ids == tuple(range(pos))
    assert state.result.text == "x" * pos
