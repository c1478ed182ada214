"""Alternative paths of routes, and the answers of every path to HEAD and OPTIONS."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from mlxpool.gateway.app import canonical_paths
from mlxpool.gateway.route_table import NOT_BUILT, ROUTES
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE

canonical = canonical_paths(spec.path for spec in ROUTES)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway without a broker."""
    with (
        GatewayThread(tmp_path_factory.mktemp("run")) as gateway,
        httpx.Client(base_url=gateway.url, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ("/rerank", "/v1/rerank"),
        ("/v2/rerank", "/v1/rerank"),
        ("/score", "/v1/score"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/models/a", "/v1/models/a"),
        ("/v1/v1/messages", "/v1/messages"),
        ("//v1/models", "/v1/models"),
        ("/v1//chat//completions/", "/v1/chat/completions"),
        ("/api/tags/", "/api/tags"),
        ("/v1/tokenize", "/tokenize"),
        ("/tokenize", "/tokenize"),
        ("/", "/"),
        ("//", "/"),
        ("/v1", "/v1"),
        ("http://127.0.0.1/v1/models", "http://127.0.0.1/v1/models"),
        ("*", "/"),
        ("localhost:443", "localhost:443"),
    ],
)
def test_a_second_path_is_that_of_a_route(asked: str, path: str) -> None:
    assert canonical(asked) == path


def test_the_path_of_a_route_stays_as_it_is() -> None:
    for path in [*(spec.path for spec in ROUTES), *NOT_BUILT]:
        assert canonical(path) == path


@pytest.mark.parametrize("path", ["/", "//", "//openapi.json", "/metrics/"])
def test_head_and_slashes(http: httpx.Client, path: str) -> None:
    head = http.head(path)
    assert head.status_code == http.get(path).status_code != 404 and head.content == b""


def test_what_programs_look_for_that_look_for_ollama(http: httpx.Client) -> None:
    answer = http.get("/", headers={"accept": "text/html"})
    assert answer.text == "Ollama is running"
    assert answer.headers["content-type"].startswith("text/plain")
    assert http.head("/").headers["content-length"] == str(len(answer.content))


def test_which_methods_there_are(http: httpx.Client) -> None:
    asked = http.options("/v1/models")
    assert (asked.status_code, asked.headers["allow"]) == (200, "GET, HEAD, OPTIONS")
    other = http.delete("/v1/models")
    assert (other.status_code, other.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert http.options("/v1/chat/completions").headers["allow"] == "POST, OPTIONS"
