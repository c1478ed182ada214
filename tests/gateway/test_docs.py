"""docs/gateway.md names every field with an effect, every path and every error code of the gateway.

/openapi.json names all fields, including those without effect and those that are refused.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxpool.common.errors import BY_CODE
from mlxpool.gateway import errors, formats
from mlxpool.gateway.ollama import fields as ollama_fields
from mlxpool.gateway.route_table import ANTHROPIC, NOT_BUILT, OLLAMA, OPENAI, ROUTES, Interface

DOCS = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
OPENAI_DOCS, _, REST = DOCS.partition("## From Anthropic's client")
ANTHROPIC_DOCS, _, REST = REST.partition("## From Ollama's client")
OLLAMA_DOCS = REST.partition("## Tools")[0]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


BODIES = [(route, route.body) for route in ROUTES if route.body is not None]


def honoured_by(interface: Interface) -> set[str]:
    """Returns the fields that have an effect in requests of an interface."""
    return {n for route, body in BODIES if route.interface is interface for n in body.honoured}


@pytest.mark.parametrize(
    ("names", "section"),
    [
        (honoured_by(OPENAI), OPENAI_DOCS),
        (honoured_by(ANTHROPIC), ANTHROPIC_DOCS),
        (honoured_by(OLLAMA) | {*ollama_fields.GENERATION_OPTIONS.honoured}, OLLAMA_DOCS),
    ],
    ids=["openai", "anthropic", "ollama"],
)
def test_every_field_with_an_effect_is_named(names: set[str], section: str) -> None:
    assert len(names) > 10
    assert not names - quoted(section)


def test_the_description_names_every_field_that_has_no_effect() -> None:
    bodies = [*(body for _, body in BODIES), ollama_fields.GENERATION_OPTIONS]
    assert sum(len(body.accepted) for body in bodies) > 100
    for body in bodies:
        properties = body.schema()["properties"]
        assert all(properties[name]["description"] == "has no effect" for name in body.accepted)


def test_the_description_names_every_field_that_is_refused() -> None:
    """A refused field's description has advice; its enum has the values that are still accepted."""
    for route, body in BODIES:
        properties = body.schema()["properties"]
        for name, (neutral, advice) in body.refused.items():
            assert properties[name]["description"] == f"not supported: {advice}", route.path
            assert all(value in properties[name]["enum"] for value in neutral), route.path


def test_every_path_is_named() -> None:
    for path in (*NOT_BUILT, *(route.path for route in ROUTES)):
        assert f"`{path.partition('/{')[0]}" in DOCS


def test_every_code_is_named_and_every_error_of_the_pool_has_one() -> None:
    codes = {code for _, code in errors.STATUS.values()}
    assert not {code for code in codes if not re.search(rf"\b{code}\b", OPENAI_DOCS)}
    assert set(BY_CODE) - set(errors.STATUS) == {"internal"}, "which is 500"


def test_every_format_is_named() -> None:
    for name in (*formats.TOOLS, *formats.THINKING):
        assert f"| {name} |" in DOCS
