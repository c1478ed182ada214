"""The digest that a resume compares names the model's files and our own rules."""

from __future__ import annotations

import pytest

from mlxpool.common.config import BUILTIN
from mlxpool.worker import catalogue, rules
from mlxpool.worker.weights import place
from mlxpool.worker.weights.folder import inspect


def test_the_digest_of_the_facts_changes_with_the_files_and_with_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = catalogue.open_source(BUILTIN["demo"]).opened.digest
    assert first == rules.digest_of(inspect(place.DEMO_FOLDER).digest) != rules.digest_of("other")
    monkeypatch.setattr(rules, "RULES", rules.RULES + 1)
    assert catalogue.open_source(BUILTIN["demo"]).opened.digest != first
