"""Integers in the JSON of commands are exact for readers with double precision."""

from __future__ import annotations

import json

from mlxpool.cli.formatting import MAX_EXACT, json_text


def test_integers_that_doubles_do_not_hold_are_strings() -> None:
    value = {"a": [MAX_EXACT, MAX_EXACT + 1, -MAX_EXACT - 1], "b": {"c": (2**64 - 1, True, 1.5)}}
    assert json.loads(json_text(value)) == {
        "a": [MAX_EXACT, str(MAX_EXACT + 1), str(-MAX_EXACT - 1)],
        "b": {"c": [str(2**64 - 1), True, 1.5]},
    }
    assert float(MAX_EXACT) == MAX_EXACT and float(MAX_EXACT + 2) != MAX_EXACT + 2
