"""The digest that a resume compares covers the model's files and our own rules."""

from __future__ import annotations

import pytest

from mlxpool.common.config.schema import BUILTIN
from mlxpool.worker import versions
from mlxpool.worker.compute import model_source
from mlxpool.worker.weights import locate
from mlxpool.worker.weights.inspect import inspect


def test_the_digest_of_the_facts_changes_with_the_files_and_with_the_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = model_source.open_source(BUILTIN["demo"]).opened.digest
    assert (
        first
        == versions.digest_of(inspect(locate.DEMO_FOLDER).digest)
        != versions.digest_of("other")
    )
    monkeypatch.setattr(versions, "RULES", versions.RULES + 1)
    assert model_source.open_source(BUILTIN["demo"]).opened.digest != first


def test_a_package_that_is_imported_without_being_installed_has_no_version() -> None:
    assert versions.version_of("mlx")
    assert versions.version_of("mlxpool-that-is-not-installed") == ""
