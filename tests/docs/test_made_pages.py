"""docs/make_pages.py has been run since the code changed."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import fields

import mlxpool.client
from mlxpool.client.jobs import BatchOptions, CallOptions, JobOptions
from mlxpool.common.config.loading import variables
from mlxpool.common.config.origins import OTHER_VARIABLES
from mlxpool.common.config.schema import NO_SETTINGS, Counting, ModelConfig, PoolConfig
from mlxpool.common.errors import BY_CODE
from mlxpool.common.options import GenerateOptions

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
    pool = page.partition("### `[pool]`\n")[2].partition("\n### ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", pool, re.M))
    names = {f"MLXPOOL_{key.upper()}" for key, default in rows.items() if default != "`[]`"}
    assert names == set(variables().values()), "lists, whose default is [], have no variable"
    ours = {  # variables between our processes, and variables of tests
        "MLXPOOL_WORKER", "MLXPOOL_GATEWAY", "MLXPOOL_HYPOTHESIS", "MLXPOOL_BENCH",
        "MLXPOOL_FRESH_TMPDIR", "MLXPOOL_TESTS_TMPDIR",
    }  # fmt: skip
    for name in set(OTHER_VARIABLES) - ours:
        assert re.search(rf"^\|.*`{name}`.* \|", page, re.M)


def sections() -> dict[str, str]:
    """Returns the sections of the page of the Python API by their headings."""
    page = (DOCS / "python-api.md").read_text("utf-8")
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))


def test_every_public_name_is_on_the_page() -> None:
    names = {name for name in sections() if re.fullmatch(r"\w+", name)}
    assert names == {*mlxpool.client.__all__, "Images", "Options", "Errors"}


def test_every_public_member_is_on_the_page() -> None:
    """A member of AsyncX is in the section of AsyncX, or in the section of X."""
    page = sections()
    seen = set()
    for name in mlxpool.client.__all__:
        text = page[name] + page[name.removeprefix("Async")]
        for key in dir(getattr(mlxpool.client, name)):
            of_base = name == "PoolError" or hasattr(Sequence, key) or hasattr(list, key)
            if not key.startswith("_") and not of_base and key != "ask":
                assert re.search(rf"^(?:\| )?`(?:await )?{key}\b", text, re.M), (name, key)
                seen.add(f"{name}.{key}")
    assert {"Client.stream", "AsyncClient.tokenize", "Stream.result", "Vectors.of"} <= seen


def test_every_option_and_error_is_on_the_page() -> None:
    text = "".join(sections().values())
    for kind in (GenerateOptions, JobOptions, CallOptions, BatchOptions):
        assert not {name for name in kind.__annotations__ if not re.search(rf"`{name}\b", text)}
    assert {kind.__name__ for kind in BY_CODE.values()} <= set(
        re.findall(r"`(\w+)`", sections()["Errors"])
    )
