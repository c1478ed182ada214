"""docs/make_pages.py has been run since the code changed."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import mlxpool.client
from mlxpool.common.config.loading import variables
from mlxpool.common.config.origins import OTHER_VARIABLES
from mlxpool.common.config.schema import NO_SETTINGS, Counting, ModelConfig, PoolConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("configuration.md", "python-api.md")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pages", DOCS / "make_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str, maker: ModuleType) -> None:
    assert set(maker.PAGES) == set(PAGES)
    page = (DOCS / name).read_text("utf-8")
    assert page == maker.PAGES[name](), "run `python docs/make_pages.py`"


def test_every_setting_is_on_the_page() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    keys = set(re.findall(r"^\| `(\w+)` \|", page, re.M))
    wanted = {f.name for kind in (PoolConfig, ModelConfig, Counting) for f in fields(kind)}
    assert wanted - {"counting", *NO_SETTINGS} <= keys


def test_every_variable_is_on_the_page() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    told = set(re.findall(r"^\| `\w+` \| `(MLXPOOL_\w+)` \|", page, re.M))
    assert told == set(variables().values())
    ours = {  # between our processes, and those of tests
        "MLXPOOL_WORKER", "MLXPOOL_GATEWAY", "MLXPOOL_HYPOTHESIS", "MLXPOOL_BENCH",
        "MLXPOOL_FRESH_TMPDIR", "MLXPOOL_TESTS_TMPDIR",
    }  # fmt: skip
    for name in set(OTHER_VARIABLES) - ours:
        assert re.search(rf"^\|.*`{name}`.* \|", page, re.M)


def test_every_public_name_is_on_the_page() -> None:
    page = (DOCS / "python-api.md").read_text("utf-8")
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == {
        *mlxpool.client.__all__,
        "Questions",
        "Inputs",
        "Images",
        "Options",
        "Errors",
    }
    for method in ("Client.stream", "Client.generate", "AsyncClient.tokenize", "Stream.result"):
        assert f"### {method}\n" in page
