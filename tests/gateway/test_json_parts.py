"""JSON of large answers, in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.gateway.json_parts import encode_in_parts

VECTORS: dict[str, Any] = {
    "object": "list",
    "data": [{"index": n, "embedding": [n / 7] * 20} for n in range(5)],
}


@pytest.mark.parametrize(
    "value",
    [
        VECTORS,
        {"id": "x", "response": {"body": VECTORS}, "error": None, "ok": True},
        [[1.5, 2], [], [3]],
        {
            "texts": ["\u00e4", "\u2028", '"\\'],
            "none": {},
            "mixed": [1, {"a": [2]}],
            "tuple": (1, 2),
        },
        {1: {"a": 2}, None: 3},
        json.loads("[" * 200 + "]" * 200),
        "text",
    ],
)
def test_it_is_the_json_of_the_value(value: Any) -> None:
    assert encode_in_parts(value).decode() == json.dumps(value, ensure_ascii=False)
    compact = (",", ":")
    wanted = json.dumps(value, ensure_ascii=False, separators=compact)
    assert encode_in_parts(value, compact).decode() == wanted


def test_what_is_no_unicode_is_replaced() -> None:
    assert encode_in_parts({"a": "\ud800"}) == b'{"a": "?"}'


def test_each_vector_is_made_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    dumps = json.dumps

    def noted(value: Any, **settings: Any) -> str:
        made.append(value)
        return dumps(value, **settings)

    monkeypatch.setattr(json, "dumps", noted)
    encode_in_parts({"response": {"body": VECTORS}})
    assert [value for value in made if isinstance(value, list)] == [
        one["embedding"] for one in VECTORS["data"]
    ]
    assert not any(isinstance(value, dict) for value in made)
