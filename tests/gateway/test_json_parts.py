"""Large JSON, written and read in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.gateway import json_parts
from mlxpool.gateway.json_parts import MAX_LIST, decode_in_parts, encode_in_parts

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
    values: list[Any] = []
    dumps = json.dumps

    def noted(value: Any, **settings: Any) -> str:
        values.append(value)
        return dumps(value, **settings)

    monkeypatch.setattr(json, "dumps", noted)
    encode_in_parts({"response": {"body": VECTORS}})
    assert [value for value in values if isinstance(value, list)] == [
        item["embedding"] for item in VECTORS["data"]
    ]
    assert not any(isinstance(value, dict) for value in values)


def test_parts_of_a_long_list_are_made_by_themselves() -> None:
    value = {"tokens": [*range(2 * MAX_LIST + 1)], "texts": ["a"] * (MAX_LIST + 1)}
    assert encode_in_parts(value).decode() == json.dumps(value)
    assert encode_in_parts(value, (",", ":")) == json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_has_not_are_refused_if_asked_for(number: float) -> None:
    value = {"a": [{"b": number}]}
    assert encode_in_parts(value).decode() == json.dumps(value)
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_in_parts(value, allow_nan=False)


# ---- read ----------------------------------------------------------------------------------------

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.sampled_from('ab,:{}[]"\\\u00e4 '), max_size=12)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(TEXTS, inner, max_size=12),
    max_leaves=60,
)
LAYOUTS = st.sampled_from([None, 1])  # indents


@pytest.fixture(params=[4, 16, 64])
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Sets the size of parts so low that a small text has many; returns the size."""
    monkeypatch.setattr(json_parts, "PART", request.param)
    return int(request.param)


@given(value=VALUES, indent=LAYOUTS, part=st.sampled_from([4, 16, 64]))
def test_the_value_is_that_of_the_text(value: Any, indent: int | None, part: int) -> None:
    text = json.dumps(value, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "PART", part)
        decoded = decode_in_parts(text)
    assert decoded == value and json.dumps(decoded, indent=indent) == text


@given(value=VALUES, at=st.integers(0, 500), put=st.sampled_from(["", *',:{}[]"1e.-x ']))
def test_what_is_no_json_is_refused_as_json_does(value: Any, at: int, put: str) -> None:
    text = json.dumps(value)
    at = min(at, len(text))
    text = text[:at] + put + text[at + 1 :]
    try:
        wanted = json.loads(text)
    except ValueError as error:
        wanted = error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_parts, "PART", 8)
        if isinstance(wanted, ValueError):
            with pytest.raises(json.JSONDecodeError):
                decode_in_parts(text)
        else:
            assert decode_in_parts(text) == wanted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[1, 2", "Expecting ',' delimiter"),
        ("[1, ]", "Expecting value"),
        ('{"a" 1}', "Expecting ':' delimiter"),
        ("{a: 1}", "Expecting property name"),
        ('{"a": 1, }', "Expecting property name"),
        ("[1] 2", "Extra data"),
        ('["a', "Unterminated string"),
        ("\ufeff[]", "BOM"),
    ],
)
def test_errors_say_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=why):
        decode_in_parts(text)


def test_a_key_that_comes_twice_has_its_last_value(small_parts: int) -> None:
    text = '{"a": 1, "b": [1, 2, 3, 4, 5, 6, 7, 8, 9], "a": 2, "c": 3}'
    assert decode_in_parts(text) == json.loads(text)
    assert [*decode_in_parts(text)] == [*json.loads(text)]


def test_what_is_nested_too_deeply_is_refused(small_parts: int) -> None:
    with pytest.raises(RecursionError):
        decode_in_parts("[" * 100_000 + "]" * 100_000)


def test_one_call_reads_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call decodes one part; between the parts other threads get the interpreter's lock."""
    read: list[int] = []
    scan = json_parts._scan

    def noted(text: str, place: int) -> tuple[Any, int]:
        value, end = scan(text, place)
        read.append(end - place)
        return value, end

    monkeypatch.setattr(json_parts, "_scan", noted)
    rows = [{"role": "user", "content": f"word {number}", "n": [number]} for number in range(5000)]
    for value in ([*range(200_000)], {"input": [[7] * 40_000] * 5}, {"messages": rows}):
        read.clear()
        assert decode_in_parts(json.dumps(value)) == value
        assert max(read) <= json_parts.PART + 2 and len(read) < 20_000
