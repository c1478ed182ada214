"""The blocks of an answer: how they begin, grow and end, and which of them are cut."""

from __future__ import annotations

import pytest

from mlxpool.client import Result
from mlxpool.common.protocol.chat import INVALID_JSON
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from mlxpool.gateway.generation.choice_streams import CALL_ID_LENGTH, ChoiceUpdate
from mlxpool.gateway.generation.output_blocks import (
    Action,
    Kind,
    OutputBlocks,
    Step,
)

ENTRY = {"token": "a", "logprob": -1.0}


def result(reason: str = "stop") -> Result:
    return Result("", (), reason, {}, {}, 0, 1)


def pushed(output: OutputBlocks, *events: Event, reason: str = "", logprobs: int = 0) -> list[Step]:
    ended = result(reason) if reason else None
    return output.push(ChoiceUpdate(0, events, (ENTRY,) * logprobs, ended))


def told(steps: list[Step]) -> list[tuple[str, int, str]]:
    return [(step.action.value, step.block.index, step.piece) for step in steps]


def test_a_block_ends_where_another_begins() -> None:
    output = OutputBlocks()
    assert told(pushed(output, Reasoning("Hm"), Reasoning("."))) == [
        ("begin", 0, ""), ("piece", 0, "Hm."),
    ]  # fmt: skip
    assert told(pushed(output, Content("a"))) == [
        ("end", 0, ""), ("begin", 1, ""), ("piece", 1, "a"),
    ]  # fmt: skip
    assert told(pushed(output, Content("b"))) == [("piece", 1, "b")]
    assert told(pushed(output, reason="stop")) == [("end", 1, "")]
    assert [block.text for block in output.blocks] == ["Hm.", "ab"]
    assert [block.kind for block in output.blocks] == [Kind.THOUGHTS, Kind.TEXT]
    assert not any(block.cut for block in output.blocks) and output.calls == 0


def test_a_call_ends_by_itself() -> None:
    output = OutputBlocks()
    call = (CallBegin("f"), CallArguments("{}"), CallEnd())
    assert [step.action for step in pushed(output, *call)] == [*Action]
    assert [step.action for step in pushed(output, *call, reason="stop")] == [*Action]
    assert pushed(OutputBlocks(), reason="stop") == []
    first, second = output.blocks
    assert output.calls == 2 and first.id != second.id and len(first.id) == CALL_ID_LENGTH
    assert first.arguments() == {} and first.name == "f"


def test_what_the_bound_of_tokens_cuts() -> None:
    output = OutputBlocks()
    pushed(output, CallBegin("f"), CallArguments('{"a": 1}'), CallEnd())
    pushed(output, CallBegin("g"), CallArguments('{"a": '))
    pushed(output, CallEnd(), reason="length")
    whole, cut = output.blocks
    assert (whole.cut, cut.cut) == (False, True)
    assert whole.arguments() == {"a": 1} and cut.arguments() == {}


@pytest.mark.parametrize(
    "text", ["5", "{", "[" * 99_999, "[1]", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}',
             '{"a": 18446744073709551616}', '{"a": ' * 21 + "1" + "}" * 21, '"a"', "{'a': 1}"],
)  # fmt: skip
def test_arguments_that_are_no_map_are_told_as_the_model_wrote_them(text: str) -> None:
    output = OutputBlocks()
    pushed(output, CallBegin("f"), CallArguments(text), CallEnd(), reason="stop")
    assert output.blocks[0].arguments() == {INVALID_JSON: text}


def test_a_line_end_within_a_string_is_no_fault() -> None:
    output = OutputBlocks()
    pushed(output, CallBegin("f"), CallArguments('{"a": "b\nc"}'), CallEnd(), reason="stop")
    assert output.blocks[0].arguments() == {"a": "b\nc"}


@pytest.mark.parametrize(
    ("text", "cut"), [("", True), ('{"a', True), ("{}", False), ('{"a": 1}', False), ("5", True)]
)
def test_a_call_is_cut_unless_its_arguments_are_whole(text: str, cut: bool) -> None:
    output = OutputBlocks()
    pushed(output, CallBegin("f"), CallArguments(text))
    pushed(output, CallEnd(), reason="length")
    assert output.blocks[0].cut is cut


def test_log_probabilities_are_those_of_text() -> None:
    output = OutputBlocks()
    pushed(output, Reasoning("Hm"), logprobs=2)
    (_, _, piece) = pushed(output, Content("a"), logprobs=1)
    assert len(piece.logprobs) == 1
    assert pushed(output, logprobs=1) == []  # the parser holds the text back
    (piece,) = pushed(output, Content("b"), logprobs=1)
    assert len(piece.logprobs) == 2 and len(output.blocks[1].logprobs) == 3
