"""A model that reads images, as the fixture `case` of a test's module names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from worker.models.seeing_cases import Case


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.write(tmp_path_factory.mktemp(case.name))


@pytest.fixture(scope="module")
def text(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(inspect(folder))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    from mlxpool.worker.weights.load import load  # it imports MLX, which a machine may lack

    return load(inspect(folder))


@pytest.fixture(scope="module")
def expected(case: Case) -> Any:
    return case.expected()
