"""Several choices in the client: their requests, and log-probabilities of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.client.choices import Choices, drafts_of
from mlxpool.client.request import generate, resumed
from mlxpool.client.stream import Frame, Result, StreamState, parse_frame
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Header, Message
from mlxpool.common.protocol.from_client import Generate, GenerateDraft, request_digest
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds


def draft(**options: Any) -> GenerateDraft:
    return generate("m", "hello", None, None, options)  # type: ignore[arg-type]


# ---- requests ------------------------------------------------------------------------------------


def test_each_choice_is_a_request_that_the_broker_takes() -> None:
    drafts = drafts_of(draft(seed=5, session="s"), 3)
    parsed = [Generate.parse(request.body(), request.blobs()) for request in drafts]
    assert [call.options.seed for call in parsed] == [5, 6, 7]
    assert [(call.choice.index, call.choice.of) for call in parsed if call.choice] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert len({call.choice.group for call in parsed if call.choice}) == 1
    assert len({request_digest(request.body(), request.blobs()) for request in drafts}) == 3
    other = drafts_of(draft(seed=5), 3)[0].settings["choice"]
    assert other["group"] != drafts[0].settings["choice"]["group"]


def test_a_single_choice_is_a_plain_request() -> None:
    (request,) = drafts_of(draft(), 1)
    assert "choice" not in request.settings and 0 <= request.options["seed"] < 2**53


@pytest.mark.parametrize("seed", [None, -1])
def test_a_seed_is_drawn_once(seed: int | None) -> None:
    first, second = (drafts_of(draft(seed=seed), 4) for _ in range(2))
    seeds = [request.options["seed"] for request in first]
    assert seeds == [*range(seeds[0], seeds[0] + 4)]
    assert seeds[0] != second[0].options["seed"]


def test_only_the_first_reports_log_probabilities_of_the_prompt() -> None:
    for options in ({"prompt_logprobs": 3}, {"echo": True, "logprobs": True, "top_logprobs": 3}):
        drafts = drafts_of(draft(**options), 3)
        parsed = [Generate.parse(request.body(), ()).options for request in drafts]
        assert [entry.prompt_alternatives for entry in parsed] == [3, -1, -1]
        assert {entry.echo for entry in parsed} == {"echo" in options}


@pytest.mark.parametrize("n", [0, 65, True, "2", 2.0])
def test_other_numbers_of_choices_are_refused(n: Any) -> None:
    with pytest.raises(BadRequest, match="must be an integer from 1 to 64"):
        drafts_of(draft(), n)


def test_an_invalid_seed_is_left_to_the_broker() -> None:
    for seed in ("x", 2**64):
        assert drafts_of(draft(seed=seed), 2)[0].options["seed"] == seed
    assert drafts_of(draft(seed=2**64 - 2), 2)[1].options["seed"] == 2**64 - 1
    with pytest.raises(BadRequest, match="choice 2 would have"):
        drafts_of(draft(seed=2**64 - 2), 3)


def result(index: int, prompt: int, cached: int, made: int) -> Result:
    usage = {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }
    return Result("t", (1,) * made, "length", usage, {}, 7 + index, 1, index=index)


def test_usage_has_the_prompt_once() -> None:
    choices = Choices([result(0, 90, 10, 4), result(1, 90, 89, 2), result(2, 90, 89, 1)])
    assert choices.usage == {
        "prompt_tokens": 90,
        "cached_tokens": 10,
        "completion_tokens": 7,
        "total_tokens": 97,
    }
    assert (choices.seed, len(choices), choices[-1].index) == (7, 3, 2)
    assert [choice.index for choice in choices.choices] == [0, 1, 2]


# ---- reports -------------------------------------------------------------------------------------


def frame(kind: str, body: dict[str, Any], *blobs: bytes, pos: int = 0) -> Frame:
    parsed = parse_frame(Message(Header(kind, bytes(16), 7, 1, pos), body, blobs))
    assert parsed is not None
    return parsed


def piece(begin: int, end: int, *ids: int, pos: int = 0, size: int = 6) -> Frame:
    """Returns a delta with log-probabilities of prompt tokens [begin, end), and then of `ids`.

    `size` is the number of tokens of the whole prompt.
    """
    entries: list[dict[str, Any]] = [
        {"prompt": n, "id": n, "token": "x"} for n in range(begin, end)
    ]
    entries += [{"id": token_id, "token": "y", "logprob": -1.0} for token_id in ids]
    facts = {"facts": {"prompt_tokens": size, "digest": "d"}} if begin == 0 else {}
    body = {"text": "", "n": len(ids), "logprobs": entries, **facts}
    return frame(kinds.DELTA, body, pack_ids(ids), pos=pos)


def reporting() -> StreamState:
    state = StreamState(bytes(16), reports=True)
    state.receive(frame(kinds.ACCEPTED, {"boot": 7, "link": 3, "queue_position": 0, "seed": 4}))
    return state


def test_entries_are_divided_between_prompt_and_ids() -> None:
    state = reporting()
    first, second = state.receive(piece(0, 4)), state.receive(piece(4, 6, 50, 51))
    assert first is not None and second is not None
    assert [entry["prompt"] for entry in (*first.prompt, *second.prompt)] == [*range(6)]
    assert first.logprobs == () and [entry["id"] for entry in second.logprobs] == [50, 51]
    state.receive(frame(kinds.DONE, {"text": "", "reason": "stop"}, pos=2))
    assert len(state.whole().prompt) == 6 and state.whole().ids == (50, 51)


@pytest.mark.parametrize(
    "lost", [piece(3, 5), piece(5, 6), piece(5, 6, 50), piece(4, 5, 50), piece(4, 4, 50)]
)
def test_a_report_with_a_gap_is_sent_again(lost: Frame) -> None:
    state = reporting()
    state.receive(piece(0, 4))
    assert state.receive(lost) is None and state.gap
    assert len(state.prompt) == 4 and not state.ids
    again = resumed(draft(prompt_logprobs=0), state, None)
    assert again.resume is not None and again.resume.body()["reported"] == 4


def test_an_end_before_the_report_is_whole_is_a_gap() -> None:
    state = reporting()
    state.receive(piece(0, 4))
    state.receive(frame(kinds.DONE, {"text": "", "reason": "length"}))
    assert "4 of 6 tokens of the prompt" in state.gap and not state.over
    state = reporting()
    state.receive(piece(0, 4))
    state.receive(frame(kinds.DONE, {"text": "", "reason": "cancelled"}))
    assert state.over and not state.gap
