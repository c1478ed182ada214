"""Multipart forms, parsed in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.openai.batches.upload import (
    MAX_HEADERS,
    Event,
    MultipartReader,
    PartBegin,
    PartData,
    PartEnd,
    boundary_of,
)

HEAD = b'Content-Disposition: form-data; name="%s"\r\n\r\n'
FILE = b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\nX: y\r\n\r\n'


def form(*contents: bytes, boundary: bytes = b"B") -> bytes:
    parts = [b"--%s\r\n%s%s\r\n" % (boundary, HEAD % b"x", content) for content in contents]
    return b"".join([*parts, b"--%s--\r\n" % boundary])


def read(body: bytes, sizes: list[int], boundary: bytes = b"B") -> list[Event]:
    """Feeds a body in pieces of these sizes; returns the events, with adjacent data joined."""
    reader, events, start = MultipartReader(boundary), list[Event](), 0
    for size in [*sizes, len(body)]:
        for event in reader.feed(body[start : start + size]):
            last = events[-1] if events else None
            if isinstance(event, PartData) and isinstance(last, PartData):
                events[-1] = PartData(last.data + event.data)
            else:
                events.append(event)
        start += size
    assert reader.complete
    return events


@given(
    some.lists(some.lists(some.sampled_from(b"\r\n-B-ax"), max_size=40).map(bytes), max_size=3),
    some.lists(some.integers(1, 9), max_size=80),
)
def test_any_content_in_any_pieces(contents: list[bytes], sizes: list[int]) -> None:
    if any(b"\r\n--Bo" in b"\r\n" + content for content in contents):
        return
    wanted: list[Event] = []
    for content in contents:
        wanted += [PartBegin("x", None), *([PartData(content)] if content else []), PartEnd()]
    assert read(form(*contents, boundary=b"Bo"), sizes, b"Bo") == wanted


def test_names_and_files() -> None:
    body = b"preamble\r\n--B\r\n" + FILE + b"1\r\n--B--\r\nepilogue"
    assert read(body, []) == [PartBegin("file", "a.jsonl"), PartData(b"1"), PartEnd()]


def test_a_name_in_other_letters() -> None:
    kind = b"content-disposition: form-data; name=file; filename*=UTF-8''%C3%A4%20b.jsonl\r\n\r\n"
    assert read(b"--B\r\n" + kind + b"\r\n--B--", [])[0] == PartBegin("file", "ä b.jsonl")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"--Bxx", "line end"),
        (b"--B\r\nX: y\r\n\r\n", "Content-Disposition"),
        (b"--B\r\n" + b"x" * (MAX_HEADERS + 1), "headers of a part"),
        (b"x" * 9000, "no part begins"),
    ],
)
def test_what_is_no_form(body: bytes, words: str) -> None:
    with pytest.raises(HttpError, match=words):
        list(MultipartReader(b"B").feed(body))


def test_the_boundary() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for kind in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"):
        with pytest.raises(HttpError) as caught:
            boundary_of(kind)
        assert caught.value.status == 415
