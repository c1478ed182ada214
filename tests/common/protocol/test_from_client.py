"""Unknown keys of a `generate` message are refused, or cause a warning."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import ALIASES, CHECKS
from mlxpool.common.protocol.from_client import KNOWN, MAX_WARNINGS, REFUSED, Generate
from mlxpool.common.protocol.to_client import Accepted


def parsed(**keys: Any) -> Generate:
    return Generate.parse({"model": "m", "prompt": "a", **keys}, [])


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_what_would_change_the_answer_is_refused_by_name(key: str) -> None:
    with pytest.raises(BadRequest, match=f"{key} is not supported: "):
        parsed(**{key: "json"})
    assert parsed(**{key: None}).warnings == ()


@pytest.mark.parametrize("option", [*CHECKS, *ALIASES])
def test_an_option_beside_options_is_refused(option: str) -> None:
    with pytest.raises(BadRequest, match=f"'{option}' is an option: send it in `options`"):
        parsed(**{option: 1})


@pytest.mark.parametrize("options", ["temperature=0", ["temperature"], 5, True])
def test_options_of_another_type_are_refused(options: Any) -> None:
    with pytest.raises(BadRequest, match="options must be a map"):
        parsed(options=options)


def test_other_unknown_keys_are_named_with_what_was_meant() -> None:
    warnings = parsed(sesion="s", later=1).warnings
    assert warnings == (
        "the unknown key 'sesion' is ignored; did you mean 'session'?",
        "the unknown key 'later' is ignored",
    )


def test_warnings_are_few_and_short() -> None:
    many = {f"x{number:0200}": 1 for number in range(500)}
    warnings = parsed(**many).warnings
    assert len(warnings) == MAX_WARNINGS + 1 and all(len(each) < 150 for each in warnings)
    assert warnings[-1] == f"{500 - MAX_WARNINGS} further unknown keys are ignored"


def test_no_known_key_is_warned_of() -> None:
    assert not KNOWN & REFUSED.keys()
    assert parsed(session="s", priority=1, durable=True, batch=False).warnings == ()


def test_warnings_travel() -> None:
    accepted = Accepted(1, 2, 0, 7, ("the unknown key 'x' is ignored",))
    assert Accepted.parse(accepted.body()) == accepted
    assert "warnings" not in Accepted(1, 2, 0, 7).body()
    assert Accepted.parse({**accepted.body(), "warnings": "x"}).warnings == ()
