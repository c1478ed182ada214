"""docs/gateway.md names every field, path and error code of the gateway."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxpool.common.errors import BY_CODE
from mlxpool.gateway import app, errors, formats
from mlxpool.gateway.ollama import requests as ollama_requests
from mlxpool.gateway.openai import requests as openai_requests

DOCS = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
OPENAI, _, REST = DOCS.partition("## From Ollama's client")
OLLAMA = REST.partition("## Tools")[0]


def quoted(text: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", text))


OPENAI_FIELDS = {
    *openai_requests.CHAT,
    *openai_requests.COMPLETION,
    *openai_requests.SAMPLING,
    *openai_requests.ACCEPTED,
    *openai_requests.CHAT_REFUSED,
    *openai_requests.COMPLETION_REFUSED,
}
OLLAMA_FIELDS = {
    *ollama_requests.GENERATE,
    *ollama_requests.CHAT,
    *ollama_requests.GENERATE_REFUSED,
    *ollama_requests.OPTIONS,
    *ollama_requests.OPTIONS_REFUSED,
}


@pytest.mark.parametrize(
    ("names", "section"),
    [(OPENAI_FIELDS, OPENAI), (OLLAMA_FIELDS, OLLAMA)],
    ids=["openai", "ollama"],
)
def test_every_field_is_named(names: set[str], section: str) -> None:
    assert not names - quoted(section)


def test_every_path_is_named() -> None:
    assert all(path.partition("/{")[0] in OLLAMA for path in app.OLLAMA_NOT_BUILT)


def test_every_code_is_named_and_every_error_of_the_pool_has_one() -> None:
    codes = {code for _, code in errors.STATUS.values()}
    assert not {code for code in codes if not re.search(rf"\b{code}\b", OPENAI)}
    assert set(BY_CODE) - set(errors.STATUS) == {"internal", "duplicate_id"}, "which are 500"


def test_every_format_is_named() -> None:
    for name in (*formats.TOOLS, *formats.THINKING):
        assert f"| {name} |" in DOCS
