"""A page of another origin cannot change anything, on any route and with any content type."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from mlxpool.gateway.route_spec import RouteSpec
from mlxpool.gateway.route_table import NOT_BUILT, ROUTES
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE
from support.secret_file import secret_file

PAGE = "https://evil.example"
ALLOWED = "https://app.example"
KEY = "k" * 32
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain")
WRITING = [route for route in ROUTES if route.method != "GET"]


def written(route: RouteSpec) -> str:
    return route.path.replace("{id}", "0" * 32)


@pytest.fixture(scope="module")
def open_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway without keys and without a broker: admitted requests wait for a broker."""
    with (
        GatewayThread(tmp_path_factory.mktemp("open"), broker_grace=0.2) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway with keys, and with an origin whose pages may use it."""
    folder = tmp_path_factory.mktemp("keys")
    keys = secret_file(folder / "keys", f"alice {KEY}\n")
    options = {"keys": keys, "cors_origins": (ALLOWED,), "broker_grace": 0.2}
    with (
        GatewayThread(folder, **options) as running,
        httpx.Client(
            base_url=running.url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE
        ) as http,
    ):
        yield http


def refused(answer: httpx.Response) -> bool:
    if answer.status_code != 403:
        return False
    assert "may not use the gateway" in answer.text and "--cors-origin" in answer.text
    return True


@pytest.mark.parametrize("route", WRITING, ids=lambda route: f"{route.method} {route.path}")
def test_no_route_serves_a_page_of_another_origin(
    open_gateway: httpx.Client, with_keys: httpx.Client, route: RouteSpec
) -> None:
    for http in (open_gateway, with_keys):
        for site_headers in (
            {"origin": PAGE},
            {"sec-fetch-site": "cross-site"},
            {"origin": "null"},
        ):
            for form in FORMS:
                headers = {**site_headers, "content-type": form}
                answer = http.request(route.method, written(route), headers=headers, content=b"x")
                assert refused(answer), (http.base_url, site_headers, form, answer.text)
    asked = {"content-type": "application/json"}
    for http, origin in (
        (open_gateway, str(open_gateway.base_url).rstrip("/")),
        (with_keys, ALLOWED),
    ):
        answer = http.request(
            route.method, written(route), headers={**asked, "origin": origin}, content=b"[]"
        )
        assert answer.status_code != 403, answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/nothing", *NOT_BUILT])
def test_other_paths_and_methods_neither(
    open_gateway: httpx.Client, method: str, path: str
) -> None:
    assert refused(open_gateway.request(method, path, headers={"origin": PAGE}))
    assert not refused(open_gateway.request(method, path))


def test_reading_is_left_to_the_browser(open_gateway: httpx.Client) -> None:
    """A page of another origin gets no CORS headers, so the browser hides the answer from it."""
    answer = open_gateway.get("/openapi.json", headers={"origin": PAGE})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
