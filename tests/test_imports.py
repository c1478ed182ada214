"""Imports of the product: no two modules import each other, directly or through others.

A process imports a module that takes long to import only when it needs the module.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("bench", "broker", "client", "cluster", "common", "gateway", "worker")
PACKAGES = (*SOURCES, "cli")  # the package `cli` is in the folder `client`
OF_NAMESPACE = {ROOT / "client" / "mlxpool" / "__main__.py"}  # modules that no package has


def cycle_in(graph: grimp.ImportGraph) -> list[str]:
    """Returns the modules of one import cycle; [] without a cycle."""
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Returns the graph of the product's imports.

    It includes imports in functions and imports that only type checks need.
    """
    first, *others = (f"mlxpool.{name}" for name in PACKAGES)
    return grimp.build_graph(first, *others, cache_dir=None)


def test_the_graph_has_every_module(graph: grimp.ImportGraph) -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder / "mlxpool").rglob("*.py")]
    assert len(graph.modules) == len({*files} - OF_NAMESPACE)


def test_no_module_imports_itself_through_others(graph: grimp.ImportGraph) -> None:
    assert cycle_in(graph) == []


def test_a_cycle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert set(cycle_in(graph)) == {"a", "b", "c"}


def packages() -> list[Path]:
    return [path.parent for folder in SOURCES for path in (ROOT / folder).rglob("__init__.py")]


@pytest.mark.parametrize("folder", packages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_says_what_it_is_for(folder: Path) -> None:
    """The package has a docstring, which contains a sentence."""
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    assert doc is not None
    assert re.search(r"\.(\s|$)", doc)  # a sentence at least


def test_every_folder_with_modules_is_a_package() -> None:
    """Each folder with modules has an `__init__.py`, whose docstring describes the package."""
    for folder in SOURCES:
        for path in {*(ROOT / folder / "mlxpool").rglob("*.py")} - OF_NAMESPACE:
            assert (path.parent / "__init__.py").exists(), path


# process -> the module that imports what a start needs; modules that it imports later or never.
STARTS = {
    "client": ("client/mlxpool/client/__init__.py", {"_hashlib", "asyncio", "numpy", "ssl"}),
    "broker": ("broker/mlxpool/broker/__main__.py", {"importlib.metadata", "numpy"}),
    "gateway": (
        "gateway/mlxpool/gateway/__main__.py",
        {"importlib.metadata", "numpy", "prometheus_client", "psutil"},
    ),
    "worker": (
        "worker/mlxpool/worker/__main__.py",
        {"PIL", "asyncio", "importlib.metadata", "jinja2", "llguidance", "mlx"},
    ),
}


def imported_at_start(path: Path) -> set[str]:
    """Returns the names that a module and its functions import with `from`, as `MODULE:NAME`.

    Imports in other blocks, such as `if` and `try`, are left out.
    """
    imports: set[str] = set()
    unread: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while unread:
        node = unread.pop()
        if isinstance(node, ast.ImportFrom):
            imports |= {f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Module | ast.FunctionDef):
            unread += node.body
    return imports


@pytest.mark.parametrize("process", STARTS)
def test_a_process_starts_without_what_takes_long_to_import(process: str) -> None:
    file, later = STARTS[process]
    names = sorted(imported_at_start(ROOT / file))
    code = f"""
import sys
for name in {names}:
    module, _, attribute = name.partition(":")
    __import__(module, fromlist=[attribute])
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    assert "mlxpool.common.errors" in modules  # the start was imported
    assert later & modules == set()
