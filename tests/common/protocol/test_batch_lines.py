"""Lines of batches become jobs; lines that cannot be jobs have an error."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.frames import TEXT_AS_BLOB, unpack
from mlxpool.common.protocol.from_client import Generate
from mlxpool.common.protocol.kept.batch_lines import (
    DEFAULTS,
    MAX_LABEL,
    MAX_LINE,
    OF_BATCHES,
    BadLine,
    Line,
    check_defaults,
    parse_line,
)
from mlxpool.common.protocol.prompts import PackedPrompt
from mlxpool.common.protocol.token_ids import pack_ids

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def parsed(line: Any, **defaults: Any) -> Line:
    return parse_line(json.dumps(line).encode(), {"model": "m", **defaults})


def error(line: Any, **defaults: Any) -> BadLine:
    """Returns the error of a bad line. `line`: bytes, or a value that is written as JSON."""
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    with pytest.raises(BadLine) as caught:
        parse_line(data, {"model": "m", **defaults})
    return caught.value


def test_a_line_is_a_request_with_the_defaults_of_its_batch() -> None:
    options = {"max_tokens": 5, "seed": 1}
    line = parsed({"id": "one", "prompt": "x", "options": {"seed": 2}}, options=options)
    assert line.label == "one"
    assert unpack(line.packed) == {
        "model": "m", "prompt": "x", "options": {"max_tokens": 5, "seed": 2},
    }  # fmt: skip
    generate = line.submit.work
    assert isinstance(generate, Generate)
    assert (generate.model, generate.options.max_tokens, generate.options.seed) == ("m", 5, 2)
    assert parsed({"model": "other", "prompt": "x"}).submit.work.model == "other"
    assert parsed({"prompt": "x"}).label == ""


def test_tools_of_the_batch_go_with_messages_alone() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    chat = parsed({"messages": [{"role": "user", "content": "x"}]}, tools=tools, think=True)
    assert unpack(chat.packed)["tools"] == tools
    assert "tools" not in unpack(parsed({"prompt": "x"}, tools=tools, think=True).packed)
    assert "tools go with messages" in str(error({"prompt": "x", "tools": tools}))


def test_what_json_has_not_is_written_otherwise() -> None:
    ids = parsed({"tokens": [1, 2, 3]})
    assert ids.blobs == (pack_ids([1, 2, 3]),) and unpack(ids.packed)["tokens"] is True
    image = base64.b64encode(PNG).decode()
    line = parsed({"prompt": "[img-0] shows", "images": [image]})
    assert line.blobs == (PNG,) and unpack(line.packed)["images"] == 1
    long = parsed({"prompt": "é" * TEXT_AS_BLOB})
    assert isinstance(long.submit.work, Generate)
    assert isinstance(long.submit.work.prompt, PackedPrompt)
    assert long.blobs == (("é" * TEXT_AS_BLOB).encode(),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "no JSON: "),
        (b"\xff", "no JSON: "),
        (b'{"prompt": NaN}', "no JSON: NaN is not a JSON number"),
        (b"[" * 100_000, "no JSON: "),
        (b"3", "must be a JSON object, got 3"),
        ({}, "give one of prompt, messages, tokens"),
        ({"prompt": "x", "tokens": [1]}, "give one of prompt, messages, tokens"),
        ({"prompt": True}, "has no blobs"),
        ({"tokens": []}, "tokens must be a list of ids, got []"),
        ({"tokens": [1, -1]}, "tokens has -1, must be ids from 0 to 4294967295"),
        ({"prompt": "x", "images": "y"}, "images must be a list of files in base64"),
        ({"prompt": "x", "images": ["*"]}, "images[0] is not base64"),
        ({"prompt": "x", "options": 3}, "options must be an object, got 3"),
        ({"prompt": "x", "options": {"top_k": -1}}, "top_k"),
        ({"prompt": "x", "temperature": 1}, "'temperature' is an option: send it in `options`"),
        ({"prompt": "x", "queue_ms": 1}, "queue_ms is of streams"),
        ({"prompt": "x", "model": 3}, "model must be a name"),
        ({"prompt": "\ud800"}, "prompt is not Unicode text"),
        ({"prompt": "x", "options": {"seed": 10**30}}, "cannot be sent"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: Any, message: str) -> None:
    bad = error(line)
    assert message in str(bad) and isinstance(bad.error, BadRequest)


@pytest.mark.parametrize("key", OF_BATCHES)
def test_what_is_of_the_batch_is_no_key_of_a_line(key: str) -> None:
    bad = error({"id": "mine", "prompt": "x", key: 1})
    assert str(bad).startswith(f"{key} is of the batch") and bad.label == "mine"


@pytest.mark.parametrize("label", [3, "x" * (MAX_LABEL + 1), "a\nb", "a\0b", "\ud800"])
def test_an_id_is_printable_text(label: Any) -> None:
    bad = error({"id": label, "prompt": "x"})
    assert f"id must be at most {MAX_LABEL} printable characters" in str(bad)
    assert bad.label == ""


def test_a_line_is_no_larger_and_no_deeper_than_a_message() -> None:
    assert isinstance(error(b" " * (MAX_LINE + 1)).error, TooLarge)
    many = [{"role": "user", "content": "x" * 100_000}] * 3
    assert isinstance(error({"messages": many}).error, TooLarge)
    deep: Any = "x"
    for _ in range(40):
        deep = [deep]
    assert "nested deeper" in str(error({"prompt": "x", "options": {"stop": deep}}))


def test_defaults_are_checked() -> None:
    assert check_defaults({"model": "m", "options": {}}) == {"model": "m", "options": {}}
    bad: Any
    for bad in ([], {"prompt": "x"}, {"options": 3}):
        with pytest.raises(BadRequest, match=r"defaults|options"):
            check_defaults(bad)
    with pytest.raises(BadRequest, match=", ".join(DEFAULTS)):
        check_defaults({"prompt": "x"})
