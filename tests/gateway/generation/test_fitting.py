"""Chat messages are left out to fit a context: none, some, or all but the last."""

from __future__ import annotations

from typing import Any

from mlxpool.gateway.generation.token_counts import cuts


def chat(roles: str) -> list[dict[str, Any]]:
    """Returns messages with these roles (s, u, a or t); the content of each is its index."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]


def contents(roles: str) -> list[str]:
    return ["".join(message["content"] for message in cut) for cut in cuts(chat(roles))]


def test_instructions_stay_and_a_cut_is_in_front_of_a_user() -> None:
    assert contents("suauatau") == ["01234567", "034567", "07"]
    assert contents("uasu") == ["2013", "23"]


def test_there_is_always_something_left() -> None:
    assert contents("u") == ["0"]
    assert contents("s") == ["0"]
    assert contents("au") == ["01", "1"]
    assert contents("uatat") == ["01234"]
