"""Message bodies are parsed into records; an error about a wrong type names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct, field

from mlxpool.common.errors import BadRequest
from mlxpool.common.records import Natural, ShortText, as_map, read


class Inner(Struct, frozen=True):
    values: tuple[int, ...] = ()


class Outer(Struct, frozen=True):
    name: ShortText = ""
    start: Annotated[int, Meta(ge=1, le=9)] = field(default=5, name="from")
    count: Natural = 0
    share: float | None = None
    data: bytes | None = None
    steps: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)


def test_keys_become_fields_by_the_names_that_they_have_in_bodies() -> None:
    body = {"name": "a", "from": 3, "share": 1, "data": b"x", "about": {"b": 2}, "later": 1}
    inner = Inner((1, 2))
    record = read(body, Outer, inner=inner)
    assert record == Outer("a", 3, 0, 1.0, b"x", about={"b": 2}, inner=inner)
    assert record.inner is inner


def test_nil_counts_as_absent() -> None:
    assert read({"from": None, "name": None}, Outer) == Outer()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"from": 10}, "from must be an integer from 1 to 9, got 10"),
        ({"from": 2**70}, f"from must be an integer from 1 to 9, got {2**70}"),
        ({"from": True}, "from must be an integer from 1 to 9, got True"),
        ({"from": 5.0}, "from must be an integer from 1 to 9, got 5.0"),
        ({"from": "5"}, "from must be an integer from 1 to 9, got '5'"),
        ({"steps": 1}, "steps must be true or false, got 1"),
        ({"name": "x" * 257}, "name must be text of at most 256 characters"),
        ({"name": b"x"}, "name must be text of at most 256 characters"),
        ({"count": -1}, "count must be an integer of at least 0, got -1"),
        ({"share": "1"}, "share must be a number, got '1'"),
        ({"data": "AAAA"}, "data must be bytes, got 'AAAA'"),
        ({"about": [1]}, "about must be a map, got [1]"),
        ({"steps": "x" * 99, "from": 0}, "from must be an integer from 1 to 9, got 0"),
        ({"steps": "x" * 99}, f"steps must be true or false, got {'x' * 99!r:.60}"),
    ],
)
def test_an_error_names_the_key_its_value_and_its_bound(body: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(body, Outer)
    assert caught.value.message == told


def test_a_lenient_reader_takes_a_value_of_another_type_for_absent() -> None:
    body = {"name": 3, "from": "x", "count": -1, "share": True, "data": "AAAA", "steps": True}
    assert read(body, Outer, lenient=True) == Outer(steps=True)


def test_records_inside_become_maps() -> None:
    body = as_map(Outer(about={"x": Inner((1,))}, inner=Inner((2,))))
    assert (body["about"], body["inner"]) == ({"x": {"values": (1,)}}, {"values": (2,)})
    assert body["start"] == 5
