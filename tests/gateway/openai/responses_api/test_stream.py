"""The sequence numbers of the events of a response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate, call_ids
from mlxpool.gateway.generation.output_blocks import OutputBlocks
from mlxpool.gateway.openai.responses_api.bodies import ResponseEvents, ResponseFrame


def numbers(data: bytes) -> list[int]:
    lines = data.decode().splitlines()
    events: list[dict[str, Any]] = [json.loads(x[6:]) for x in lines if x.startswith("data: ")]
    return [event["sequence_number"] for event in events]


@pytest.mark.parametrize(("after", "head", "broken"), [(-1, [0, 1], 1), (0, [1], 1), (7, [], 7)])
def test_a_reading_that_broke_off_goes_on_behind_its_last_event(
    after: int, head: list[int], broken: int
) -> None:
    frame = ResponseFrame("a" * 32, 0, {"model": "m"}, summary=False)
    events = ResponseEvents(frame, OutputBlocks(call_ids("a")), 0, after)
    assert numbers(events.head()) == head
    assert numbers(events.broken_off(HttpError(503, "away", "broker_lost"))) == [broken]


def test_a_failure_after_which_the_response_went_on_keeps_its_number() -> None:
    frame = ResponseFrame("a" * 32, 0, {"model": "m"}, summary=False)
    events = ResponseEvents(frame, OutputBlocks(call_ids("a")), 0)
    assert numbers(events.head()) == [0, 1]
    assert events.update(ChoiceUpdate(0, (), failures=2)) == b""  # the failures were events 2 and 3
    assert numbers(events.failed(HttpError(500, "lost", "worker_lost"))) == [4]
