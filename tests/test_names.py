"""Public names that users rely on, and libraries that an import must not load."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import mlxpool.client
from mlxpool.common.version import VERSION
from support.pool import PATIENCE

ROOT = Path(__file__).parents[1]
CALLS = (
    "ask batch batches cancel choices classify close decide decide_all delete_file describe"
    " detokenize embed fetch files follow_jobs for_owner generate job jobs keep models release"
    " rerank retry stream stream_choices submit submit_batch submit_call submitted token_texts"
    " tokenize tokenize_chat"
)
SOURCE_ROOTS = ("broker", "client", "cluster", "common", "gateway", "worker")


def modules(root: str) -> Iterator[Path]:
    return (ROOT / root / "mlxpool").rglob("*.py")


def test_the_public_names_of_the_client() -> None:
    assert sorted(mlxpool.client.__all__) == [
        "AsyncBatch",
        "AsyncChoicesStream",
        "AsyncClient",
        "AsyncStream",
        "Batch",
        "ChatTokens",
        "Choices",
        "ChoicesStream",
        "Client",
        "Decision",
        "DecisionList",
        "Delta",
        "Job",
        "LineResult",
        "Pace",
        "PoolError",
        "Ranked",
        "Ranking",
        "Result",
        "Stream",
        "Vectors",
    ]
    for name in mlxpool.client.__all__:
        assert getattr(mlxpool.client, name).__name__ == name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mlxpool.client.nonsense


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("Client", CALLS),
        ("AsyncClient", CALLS.replace("stream_choices ", "stream_choices streams ")),
        ("Stream", "close facts gen id read result"),
        ("AsyncStream", "accepted close facts gen id read ready result"),
    ],
)
def test_the_public_names_of_its_classes(of: str, names: str) -> None:
    public = [name for name in dir(getattr(mlxpool.client, of)) if not name.startswith("_")]
    assert public == names.split()


def test_the_namespace_has_no_init() -> None:
    """An `__init__` would hide other source roots (PEP 420), see common/package/build_hook.py."""
    assert not [root for root in SOURCE_ROOTS if (ROOT / root / "mlxpool" / "__init__.py").exists()]
    assert not list(ROOT.glob("tests/**/__init__.py"))


def test_the_version() -> None:
    assert version("mlxpool") == VERSION
    alone = [sys.executable, "-c", "import mlxpool; print(mlxpool.__version__)"]
    done = subprocess.run(alone, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{VERSION}\n", "")


def imported(module: str) -> set[str]:
    """Returns the top-level packages that are loaded after an import of a module."""
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return set(done.stdout.split())


HEAVY = {"mlx", "tokenizers", "numpy", "jinja2", "safetensors", "torch"}


@pytest.mark.parametrize(
    "module", ["mlxpool.client", "mlxpool.broker.edge.broker", "mlxpool.cli.main"]
)
def test_an_import_without_the_heavy_libraries(module: str) -> None:
    names = imported(module)
    assert "mlxpool" in names
    assert not names & HEAVY


def test_the_command_line_starts_without_what_it_may_not_need() -> None:
    assert not imported("mlxpool.cli.main") & {"asyncio", "psutil"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_nothing_pickles(root: str) -> None:
    """No module imports pickle: unpickling data from a socket would run code of the sender."""
    paths = list(modules(root))
    assert paths
    for path in paths:
        assert not imports(path) & {"pickle", "marshal", "shelve", "dill"}, path
        assert "_pyobj(" not in path.read_text("utf-8"), path
