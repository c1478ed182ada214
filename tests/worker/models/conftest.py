"""Fixtures of models that read images: all of CASES, or the case that a module's fixture names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.weights.inspect import inspect
from worker.models.seeing_cases import CASES, Case


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    model_case: Case = request.param
    return model_case


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case.write(tmp_path_factory.mktemp(case.name))


@pytest.fixture(scope="module")
def text(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(inspect(folder))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    from mlxpool.worker.weights.load import load  # `load` imports MLX, which a machine may lack

    return load(inspect(folder))


@pytest.fixture(scope="module")
def expected(case: Case) -> Any:
    return case.expected()
