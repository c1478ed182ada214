"""The sources of lines: files, maps and texts, in parts; errors name the first bad line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.client.batches import source as source_of
from mlxpool.client.batches.source import Part, Source
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.protocol.kept.file_messages import PART_BYTES

MODEL = {"model": "m"}


def prompts(count: int, size: int = 1) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}" + "x" * size} for number in range(count)]


def whole(parts: list[Part]) -> bytes:
    """Returns the joined bytes of parts, which must be contiguous and end with the last part."""
    data = b""
    for part in parts:
        assert part.start == len(data)
        data += part.data
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    return data


@pytest.mark.parametrize("size", [1, 5000, 300_000])
def test_parts_are_the_file(tmp_path: Path, size: int) -> None:
    text = "".join(json.dumps(line) + "\n" for line in prompts(7, size))
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    for lines in (path, str(path), text.splitlines(), prompts(7, size)):
        source = Source(lines, MODEL)
        parts = list(source.parts())
        assert whole(parts) == text.encode()
        assert all(len(part.data) <= PART_BYTES for part in parts)
        assert (source.count, source.size) == (7, len(text))
        assert source.digest.digest() == hashlib.sha256(text.encode()).digest()


def test_empty_lines_are_kept_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    source = Source(path, MODEL)
    assert whole(list(source.parts())) == b'{"prompt": "a"}\r\n\n  \n{"prompt": "b"}\n'
    assert source.count == 2


def test_lines_are_read_as_they_are_needed() -> None:
    read = 0

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal read
        for line in prompts(2000, 1000):
            read += 1
            yield line

    source = Source(lines(), MODEL)
    next(source.parts())
    assert 0 < read < 400 and not source.repeatable


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"prompt": "a"}, {"prompt": 5}], "line 2: prompt must be text"),
        ([{"id": "x", "prompt": "a", "deadline_ms": 3}], r"line 1 \(id 'x'\): deadline_ms is of"),
        (["{"], "line 1: no JSON"),
        (['{"prompt":\n"x"}'], "line 1 has a line end in it"),
        ([{"prompt": float("nan")}], "line 1 cannot be written as JSON"),
        ([3], "line 1 must be a map, a text or bytes, got 3"),
        ([], "there is no line"),
        (["", b"\n"], "there is no line"),
    ],
)
def test_a_bad_line_is_named(lines: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        list(Source(lines, MODEL).parts())


def test_bad_lines_pass_unchecked() -> None:
    assert whole(list(Source(["{"], MODEL, check=False).parts())) == b"{\n"


def test_a_line_without_a_model_is_named() -> None:
    with pytest.raises(BadRequest, match="line 1: model must be a name"):
        list(Source([{"prompt": "x"}], {}).parts())


def test_a_line_that_is_too_long_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_of, "MAX_LINE", 100)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(TooLarge, match="line 1 has more than 100 bytes"):
        list(Source(path, MODEL).parts())
