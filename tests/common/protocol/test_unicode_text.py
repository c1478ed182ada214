"""An unpaired surrogate is found at any place in a value, and the error names the place."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import Garbage, Header, decode, encode
from mlxpool.common.protocol.unicode_text import not_unicode

HALF = "a\ud83d"
SAYS = "it has half a surrogate pair, U+D83D, at character 1"
BODIES: list[tuple[Any, str]] = [
    ({"messages": [{"content": "x"}, {"content": HALF}]}, "messages[1].content"),
    ({"tools": [{"function": {"name": HALF}}]}, "tools[0].function.name"),
    ({"options": {"stop": ["x", HALF]}}, "options.stop[1]"),
    ({"schema": {"properties": {HALF: 1}}}, "a key of schema.properties"),
    ({HALF: 1}, "a key of the body"),
    ({"metadata": {"k": HALF}}, "metadata.k"),
]


@pytest.mark.parametrize(("body", "place"), BODIES)
def test_it_is_named_with_its_place(body: Any, place: str) -> None:
    assert not_unicode(body) == f"{place} is not Unicode text: {SAYS}"
    with pytest.raises(BadRequest) as sent:
        encode(Header("generate", bytes(16)), body)
    assert f"{place} is not Unicode text" in sent.value.message
    head = encode(Header("generate", bytes(16)), {})[0]
    packed = msgpack.packb(body, unicode_errors="surrogatepass")
    with pytest.raises(Garbage) as received:
        decode([head, packed])
    assert received.value.message == f"{place} is not Unicode text: {SAYS}"
    assert received.value.about == bytes(16), "so that its client is answered"


def test_whole_characters_are_text() -> None:
    assert (
        not_unicode({"é": ["😀", 1, None, {"a": "\udbff\udfff".encode("utf-16", "surrogatepass")}]})
        == ""
    )


def test_other_bytes_that_are_no_text_are_named_as_before() -> None:
    head = encode(Header("generate", bytes(16)), {})[0]
    with pytest.raises(Garbage, match="not msgpack: UnicodeDecodeError"):
        decode([head, b"\x81\xa1a\xa1\xff"])
