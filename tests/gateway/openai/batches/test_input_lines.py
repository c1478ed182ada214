"""Lines of input files: lines of unusual form, and errors for lines that are not requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.batches import lines as input_lines
from mlxpool.gateway.openai.batches.bodies import MAX_FAULTS
from mlxpool.gateway.openai.batches.fields import CHATS, COMPLETIONS, MAX_LINE, MAX_LINES
from mlxpool.gateway.openai.batches.lines import AnswerSettings
from mlxpool.gateway.openai.batches.requests import LineReader

MODEL = ModelInfo.from_row({"name": "m", "state": "ready", "context": 100_000})
CHAT_MODEL = ModelInfo(
    "m", "ready", True, True, "", 100_000, 0, 0, "", "", ChatFormats("hermes", None)
)


def line(name: str = "a", **body: Any) -> bytes:
    given = {"model": "m", "prompt": "x", **body}
    request = {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": given}
    return json.dumps(request).encode()


def chat(**body: Any) -> bytes:
    given = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body}
    request = {"custom_id": "a", "method": "POST", "url": CHATS, "body": given}
    return json.dumps(request).encode()


def read(
    lines: Sequence[bytes], endpoint: str = COMPLETIONS, model: ModelInfo = MODEL
) -> tuple[LineReader, list[dict[str, Any]]]:
    """Returns the reader after it has read the lines, and the pool's lines made of them."""
    reader = LineReader(endpoint)
    data = b"".join(
        reader.pool_lines(reader.parse(some), lambda name: model)
        for some in input_lines.slices_of(lines)
    )
    return reader, [json.loads(text) for text in data.splitlines()]


@pytest.mark.parametrize(
    "lines",
    [
        [line("a"), line("b")],
        [line("a") + b"\r", line("b") + b"\r", b"\r", b""],  # lines of a file with CRLF
        [b"\xef\xbb\xbf" + line("a"), line("b")],  # a byte order mark
        [b"", b"   ", line("a"), b"\t", line("b"), b""],
        [b"  " + line("a"), line("b") + b"  "],
    ],
)
def test_what_does_no_harm(lines: Sequence[bytes]) -> None:
    reader, pool_lines = read(lines)
    assert (reader.faults, reader.total) == ([], 2)
    assert [pool_line["id"] for pool_line in pool_lines] == ["a", "b"]


BAD = {
    "invalid UTF-8": (line()[:-3] + b'\xff"}}', "invalid_json_line"),
    "UTF-16": (line().decode().encode("utf-16"), "invalid_json_line"),
    "half of a line": (line()[:-5], "invalid_json_line"),
    "two lines": (line("a") + b"\r" + line("b"), "invalid_json_line"),
    "an array": (b"[1]", "invalid_json_line"),
    "a number": (b"7", "invalid_json_line"),
    "null": (b"null", "invalid_json_line"),
    "deep": (b'{"a":' * 100_000, "invalid_json_line"),
    "a long integer": (b'{"custom_id": ' + b"1" * 5000 + b"}", "invalid_json_line"),
    "a NUL": (line("a\0"), "bad_request"),
    "a surrogate": (line("\ud800"), "bad_request"),
    "no id": (line(""), "bad_request"),
    "an id that is too long": (line("x" * 257), "bad_request"),
    "an id that is a number": (line().replace(b'"a"', b"7"), "bad_request"),
    "another method": (line().replace(b"POST", b"GET"), "bad_request"),
    "another endpoint": (line().replace(b"completions", b"embeddings"), "mismatched_endpoint"),
    "a member too much": (line()[:-1] + b', "extra": 1}', "unknown_parameter"),
    "a body that is a list": (line().replace(b'{"model"', b'[{"model"').replace(b"}}", b"}]}"),
                              "bad_request"),
    "no model": (line(model=None), "bad_request"),
    "NaN": (line(temperature=float("nan")), "bad_request"),
    "infinity": (line().replace(b'"x"', b'"x", "temperature": 1e999'), "bad_request"),
    "a huge seed": (line(seed=10**400), "bad_request"),
    "n": (line(n=2), "unsupported_parameter"),
    "several prompts": (line(prompt=["a", "b"]), "unsupported_parameter"),
    "a stream": (line(stream=True), "unsupported_parameter"),
    "a field too much": (line(temprature=1), "unknown_parameter"),
    "a line that is too long": (line(prompt="x" * MAX_LINE), "line_too_large"),
    "a request that is too long": (line(prompt="x" * (MAX_LINE - 500)), "bad_request"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_line_with_a_fault_is_named(name: str) -> None:
    """Lines after a faulty line are still checked, but no longer converted."""
    data, code = BAD[name]
    reader, pool_lines = read([line("first"), b"", data, line("last", n=3)])
    assert [fault.line for fault in reader.faults] == [3, 4]
    assert code == reader.faults[0].code, reader.faults[0]
    assert reader.faults[0].message.startswith("line 3: ")
    assert len(reader.faults[0].message) < 700
    assert len(pool_lines) <= 1  # no line is made after a fault


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"stream": True}, "unsupported_parameter"),
        ({"n": 2}, "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters":
            {"type": "object", "properties": {"a": {"maximum": float("nan")}}}}}]}, "bad_request"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ],
)  # fmt: skip
def test_chats_with_faults(given: dict[str, Any], code: str | None) -> None:
    reader, _ = read([chat(**given)], CHATS, CHAT_MODEL)
    assert code in (None, *(fault.code for fault in reader.faults))
    assert code is None or reader.faults


def test_tools_that_the_pool_gets_as_text_are_kept_for_the_answer() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text_formats = ChatFormats(None, None, "forced")
    for formats, as_text in (text_formats, True), (ChatFormats("hermes", None), False):
        model = replace(CHAT_MODEL, chat=formats)
        reader, (pool_line,) = read([chat(tools=tools, tool_choice="required")], CHATS, model)
        asked = AnswerSettings.of(pool_line)
        assert not reader.faults and pool_line["options"]["format"]["type"] == "lark"
        assert pool_line.get("tools") == (None if as_text else tools)
        assert list(asked.tools) == (tools if as_text else [])
        assert asked.chat.tools == ("llama_json" if as_text else "hermes")


def test_one_bad_byte_near_the_end_of_a_long_file() -> None:
    lines = [line(str(number)) for number in range(MAX_LINES)]
    lines[MAX_LINES - 2] = lines[MAX_LINES - 2][:-3] + b'\xff"}}'
    reader, _ = read(lines)
    (fault,) = reader.faults
    assert (fault.line, fault.code) == (MAX_LINES - 1, "invalid_json_line")
    assert reader.total == MAX_LINES


def test_duplicates_are_named_by_their_second_line() -> None:
    reader, _ = read([line("a"), line("b"), b"", line("a")])
    (fault,) = reader.faults
    assert (fault.line, fault.code, fault.param) == (4, "duplicate_custom_id", "custom_id")


def test_no_more_faults_are_looked_for_than_are_told() -> None:
    def lines() -> Iterator[bytes]:
        for _ in range(100):
            yield b"{"

    reader, _ = read(list(lines()))
    assert reader.given_up and len(reader.faults) == MAX_FAULTS


def test_slices_are_short() -> None:
    for sizes in ([], [1], [1] * 100, [10**6], [10, 10**6, 10, 10], [40_000] * 5):
        lines = [b"x" * size for size in sizes]
        slices = list(input_lines.slices_of(lines))
        assert [data for some in slices for data in some] == lines
        for some in slices:
            assert 1 <= len(some) <= input_lines.SLICE_LINES
            assert len(some) == 1 or sum(map(len, some)) <= input_lines.SLICE_BYTES


def test_empty_lines_are_bounded_as_others_are() -> None:
    reader, pool_lines = read([b"", b" ", line(), *[b"\r"] * (MAX_LINES - 2)])
    assert not reader.faults and len(pool_lines) == 1 and not reader.given_up
    reader, _ = read([*[b""] * MAX_LINES, b""])
    (fault,) = reader.faults
    assert fault.code == "too_many_lines" and reader.given_up
    assert fault.message == f"the file has more than {MAX_LINES} empty lines: delete them"
