"""The example client, made only from docs/protocol.md, gets the right tokens."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.worker.engine.counting_engine import piece, token_at
from support.pool import PATIENCE, Pool
from support.resume_scenario import output_over_every_loss

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_client.py"
VOCAB = 50_000


def complete(pool: Pool, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the example to its end."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE), str(pool.run_dir), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("count", [1, 40, 1500])
def test_it_prints_the_completion(tmp_path: Path, count: int) -> None:
    """1,500 tokens exceed the default flow-control window, so the client must send acks."""
    with Pool(tmp_path) as pool:
        result = complete(pool, "counting", "hello", "--max-tokens", str(count), "--seed", "7")
    prompt = list(b"hello")
    expected = b"".join(piece(token_at(prompt, 7, i, VOCAB)) for i in range(count)).decode()
    assert (result.returncode, result.stdout) == (0, expected + "\n"), result.stderr


def test_it_fails_with_the_brokers_reason(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        result = complete(pool, "nobody", "hello")
    assert result.returncode == 1
    assert "unknown_model" in result.stderr


def test_it_fails_when_the_stream_does(tmp_path: Path) -> None:
    config = """
        [models.failing]
        path = "builtin:counting"
        counting = { fault = "raise", fault_at = 3 }
    """
    with Pool(tmp_path, config) as pool:
        result = complete(pool, "failing", "hello", "--max-tokens", "9", "--seed", "7")
    assert result.returncode == 1
    expected = "".join(piece(token_at(list(b"hello"), 7, i, VOCAB)).decode() for i in range(3))
    assert result.stdout == expected
    assert "internal" in result.stderr


def test_it_resumes_after_every_kind_of_loss() -> None:
    assert output_over_every_loss([sys.executable, str(EXAMPLE)]) == "xxxxxx\n"


def test_it_imports_nothing_of_mlxpool() -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "zmq"}
