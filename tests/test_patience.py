"""Time limits of tests also suit a machine that is ten times slower."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Functions of httpx, which gives up after 5 s if a call has no `timeout`.
REQUESTS = frozenset({"get", "post", "put", "patch", "delete", "head", "options"})
HTTPX = REQUESTS | {"request", "stream", "Client", "AsyncClient"}


def unbounded(source: str) -> Iterator[int]:
    """Yields the line numbers of httpx calls without the argument `timeout`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            module, name = node.func.value, node.func.attr
            of_httpx = isinstance(module, ast.Name) and module.id == "httpx" and name in HTTPX
            if of_httpx and not {keyword.arg for keyword in node.keywords} & {"timeout", None}:
                yield node.lineno


@pytest.mark.parametrize("name", sorted(HTTPX))
def test_a_call_without_its_time_is_found(name: str) -> None:
    assert list(unbounded(f"import httpx\nhttpx.{name}(url)")) == [2]
    assert not list(unbounded(f"import httpx\nhttpx.{name}(url, timeout=PATIENCE)"))


def test_every_request_over_http_says_how_long_it_may_take() -> None:
    places = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if "httpx" in (text := path.read_text("utf-8"))
        for line in unbounded(text)
    ]
    assert not places, "give timeout=PATIENCE"


NUMBERS = """
import inspect
from mlxpool.broker.edge import http_gateway
from mlxpool.broker.http import loop_exchange, server
from mlxpool.cli import admin, request_flags
from mlxpool.client import AsyncClient, Client
from mlxpool.client.retry import Pace
from mlxpool.worker.preparation import lanes

defaults = [inspect.signature(kind).parameters["connect_timeout"].default
            for kind in (AsyncClient, Client)]
asked = inspect.signature(admin.ask).parameters["timeout"].default
graces = [request_flags.IPC_GRACE, request_flags.TCP_GRACE, Pace().overdue, Pace().connect_grace]
waits = [loop_exchange.LatestSnapshot().max_wait, loop_exchange.LoopQueue().max_wait]
waits += [lanes.REPLY_TIMEOUT, http_gateway.ABORT_GRACE]
print(*defaults, asked, *graces, *waits, server.Connections().max_seconds)
"""


def test_processes_that_tests_start_wait_for_a_busy_broker() -> None:
    """The longer time limits come from support/patient/sitecustomize.py."""
    done = subprocess.run([sys.executable, "-c", NUMBERS], capture_output=True, text=True)
    *waits, of_connections = done.stdout.split()
    assert waits == ["60.0"] * 11 and float(of_connections) > 60, done.stderr
