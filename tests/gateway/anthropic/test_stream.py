"""The events of tool calls in a streamed message."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxpool.client import Result
from mlxpool.common.protocol.chat import INVALID_JSON
from mlxpool.gateway.anthropic.bodies import MessageEvents, MessageFrame
from mlxpool.gateway.formats.events import CallArguments, CallBegin, CallEnd
from mlxpool.gateway.generation.choice_streams import ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import OutputBlocks


def pieces(*texts: str, eager: bool = False, reason: str = "stop") -> list[str]:
    """Returns the `partial_json` of the events of a call whose arguments come in these pieces."""
    frame = MessageFrame("1", "m", True, frozenset({"f"} if eager else ()))
    generation: Any = SimpleNamespace(facts={})
    events = MessageEvents(frame, OutputBlocks(), generation)
    updates = [ChoiceUpdate(0, (CallBegin("f"),))]
    updates += [ChoiceUpdate(0, (CallArguments(text),)) for text in texts]
    result = Result("", (), reason, {}, {}, 0, 1)
    updates.append(ChoiceUpdate(0, (CallEnd(),), result=result))
    data = b"".join(map(events.update, updates)).decode()
    lines = [line[6:] for line in data.splitlines() if line.startswith("data: ")]
    deltas = [cast(dict[str, Any], json.loads(line)).get("delta") or {} for line in lines]
    return [delta["partial_json"] for delta in deltas if "partial_json" in delta]


def test_arguments_come_at_the_end_of_a_call_in_one_piece() -> None:
    assert pieces('{"a": ', "1}") == ['{"a": 1}']


@pytest.mark.parametrize("text", ['{"a": Oslo}', "5", '{"a": 1'])
def test_arguments_that_are_no_map_are_still_json(text: str) -> None:
    (piece,) = pieces(text)
    assert json.loads(piece) == {INVALID_JSON: text}


def test_those_of_a_cut_call_are_left_out() -> None:
    assert pieces('{"a": ', reason="length") == []


def test_those_of_an_eager_tool_come_as_the_model_writes_them() -> None:
    assert pieces('{"a": ', "Oslo}", eager=True) == ['{"a": ', "Oslo}"]
