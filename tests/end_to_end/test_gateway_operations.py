"""A gateway in production: access log, metrics, ids of requests, CORS, openapi.json, drain."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate
from prometheus_client.parser import text_string_to_metric_families

from mlxpool.gateway.operations.exchange import FURTHER_ROUTES
from mlxpool.gateway.route_table import ROUTES
from support.gateway_process import serving
from support.gateway_thread import GatewayThread
from support.openapi_answers import faults, unknown_members
from support.openapi_answers import validator as validator_of
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file

KEY = "k" * 32
SECRET = "confidential words"
CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
"""
ENDLESS: dict[str, Any] = {
    "model": "slow", "prompt": "x", "max_tokens": 10**5, "stream": True,
}  # fmt: skip
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def gateway(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    keys = secret_file(tmp_path_factory.mktemp("keys") / "keys", f"alice {KEY} operator\n")
    with GatewayThread(pool.run_dir, keys=keys, cors_origins=(ORIGIN,)) as running:
        yield running


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE) as new_client:
        yield new_client


# ---- access log ----------------------------------------------------------------------------------


def line_of(caplog: pytest.LogCaptureFixture, ident: str) -> dict[str, Any]:
    """Returns the one line of the access log about a request, as soon as it is written."""

    def found() -> list[logging.LogRecord]:
        records = [record for record in caplog.records if record.name == "mlxpool.gateway.access"]
        return [record for record in records if vars(record)["request_id"] == ident]

    (record,) = until(found, "the request is logged")
    return dict(vars(record))


def test_a_line_for_each_request(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    body = {"model": "counting", "prompt": SECRET, "max_tokens": 3, "n": 2, "seed": 1}
    answer = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-1"})
    line = line_of(caplog, "mine-1")
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["key"], line["model"], line["streamed"]) == ("alice", "counting", False)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(SECRET), 6)
    assert 0 < line["first_token_ms"] <= line["duration_ms"] and line["error"] is None
    assert answer.json()["id"] == f"cmpl-{line['pool_id']}", "as in the pool's log"
    assert line["client"] == "127.0.0.1"
    assert answer.json()["usage"]["completion_tokens"] == 6
    chat = {"model": "counting", "messages": [{"role": "user", "content": SECRET}]}
    http.post(
        "/v1/chat/completions",
        json={**chat, "max_tokens": 2, "stream": True},
        headers={"x-request-id": "mine-2"},
    )
    line = line_of(caplog, "mine-2")
    assert (line["streamed"], line["completion_tokens"]) == (True, 2)
    embed = {"model": "demo-embed", "input": [SECRET, "b"]}
    usage = http.post("/v1/embeddings", json=embed, headers={"x-request-id": "mine-3"}).json()
    line = line_of(caplog, "mine-3")
    assert line["prompt_tokens"] == usage["usage"]["prompt_tokens"] and line["model"]
    assert SECRET not in caplog.text and KEY not in caplog.text
    for record in caplog.records:
        assert SECRET not in str(vars(record)) and KEY not in str(vars(record))


def test_lines_of_requests_that_fail(
    http: httpx.Client, gateway: GatewayThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")

    def ask(ident: str, method: str, path: str, **more: Any) -> dict[str, Any]:
        http.request(
            method, path, headers={"x-request-id": ident, **more.pop("headers", {})}, **more
        )
        return line_of(caplog, ident)

    unknown = ask("e-1", "POST", "/v1/completions", json={"model": "none", "prompt": "x"})
    assert (unknown["status"], unknown["error"], unknown["model"]) == (404, "model_not_found", None)
    lost = ask("e-2", "GET", "/nowhere/x")
    assert (lost["route"], lost["path"], lost["status"]) == ("other", "/nowhere/x", 404)
    slip = ask("e-2a", "GET", f"/v1/chat/{KEY}/Ab+/cd")
    assert slip["path"] == "/v1/chat/…/…/cd", "a client has put its key there"
    denied = ask("e-3", "GET", "/v1/models", headers={"authorization": "Bearer nobody"})
    assert (denied["status"], denied["key"]) == (401, None)
    with http.stream(
        "POST", "/v1/completions", json=ENDLESS, headers={"x-request-id": "e-4"}
    ) as it:
        next(it.iter_lines())
    left = line_of(caplog, "e-4")
    assert (left["status"], left["error"]) == (200, "client_disconnected")
    with httpx.Client(timeout=PATIENCE) as hasty, pytest.raises(httpx.ReadTimeout):
        hasty.post(
            f"{gateway.url}/v1/completions",
            json={**ENDLESS, "stream": False},
            headers={"authorization": f"Bearer {KEY}", "x-request-id": "e-5"},
            timeout=httpx.Timeout(PATIENCE, read=0.3),
        )
    assert line_of(caplog, "e-5")["status"] == 499


def exchange(url: str, sent: bytes) -> bytes:
    """Sends these bytes; returns all data until the gateway closes the connection."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), PATIENCE) as connection:
        connection.sendall(sent)
        said = b""
        while piece := connection.recv(4096):
            said += piece
    return said


@pytest.mark.parametrize(
    ("start", "method", "path"),
    [
        (b"GET /a%0Ab HTTP/1.1", "GET", "/…"),
        (b"CONNECT example.com:443 HTTP/1.1", "CONNECT", "example.com:443"),
        (b"GET http://example.com/v1/models HTTP/1.1", "GET", "http://example.com/v1/models"),
        (b"BREW /pot HTTP/1.1", "other", "/pot"),
    ],
)
def test_what_no_route_matches_is_logged_and_counted(
    gateway: GatewayThread,
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    start: bytes,
    method: str,
    path: str,
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    key = ("mlxpool_gateway_requests_total", "other", "404")
    before = values(http.get("/metrics").text).get(key, 0)
    ident = f"lost-{method}-{len(path)}"
    lines = f"\r\nhost: x\r\nconnection: close\r\nx-request-id: {ident}\r\n\r\n".encode()
    said = exchange(gateway.url, start + lines)
    assert said.startswith(b"HTTP/1.1 404 ") and b"unknown_url" in said
    line = line_of(caplog, ident)
    assert (line["method"], line["route"], line["path"]) == (method, "other", path)
    assert values(http.get("/metrics").text)[key] == before + 1


@pytest.mark.parametrize(
    "sent",
    [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nx: " + b"y" * 2**15],
)
def test_bytes_that_are_no_request_are_one_line_and_counted(
    gateway: GatewayThread, http: httpx.Client, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    key = ("mlxpool_gateway_requests_total", "unparsable", "400")
    before = values(http.get("/metrics").text).get(key, 0)
    said = exchange(gateway.url, sent)
    head, _, body = said.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert head.startswith(b"HTTP/1.1 400 ") and error["code"] == "not_http"
    line = line_of(caplog, error["request_id"])
    assert f"x-request-id: {line['request_id']}".encode() in head
    assert (line["route"], line["status"], line["client"]) == ("unparsable", 400, "127.0.0.1")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]
    assert values(http.get("/metrics").text)[key] == before + 1


def test_a_body_that_breaks_off_into_garbage_is_no_traceback(
    gateway: GatewayThread, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    chunked = b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for path in (b"/nowhere", b"/v1/completions"):
        exchange(gateway.url, b"POST " + path + chunked + b"zz\r\n")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings


def test_an_upgrade_is_answered_as_a_request(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "x-request-id": "up-1"}
    assert http.get("/v1/realtime", headers=headers).status_code == 404
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_preflights_are_logged_and_counted(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    before = values(http.get("/metrics").text)
    asked = {"access-control-request-method": "POST"}
    for origin, status in ((ORIGIN, 200), ("https://evil.example", 400)):
        headers = {**asked, "origin": origin, "x-request-id": f"pre-{status}"}
        answer = http.options("/v1/chat/completions", headers=headers)
        assert answer.headers["x-request-id"] == f"pre-{status}"
        line = line_of(caplog, f"pre-{status}")
        assert (line["method"], line["route"]) == ("OPTIONS", "preflight")
        assert line["status"] == answer.status_code == status
        key = ("mlxpool_gateway_requests_total", "preflight", str(status))
        assert values(http.get("/metrics").text)[key] == before.get(key, 0) + 1


@pytest.mark.parametrize(
    ("trusted", "client"),
    [((), "127.0.0.1"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.0/8",), "192.0.2.7")],
)
def test_only_a_trusted_proxy_names_the_client(
    pool: Pool, caplog: pytest.LogCaptureFixture, trusted: tuple[str, ...], client: str
) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    ident = f"proxied-{len(trusted)}-{client}"
    headers = {"x-forwarded-for": "192.0.2.7", "x-request-id": ident}
    with GatewayThread(pool.run_dir, trusted_proxies=trusted) as behind:
        httpx.get(f"{behind.url}/health", headers=headers, timeout=PATIENCE)
    assert line_of(caplog, ident)["client"] == client


def test_the_access_log_can_be_off(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    with GatewayThread(pool.run_dir, access_log=False) as quiet:
        assert httpx.get(f"{quiet.url}/health", timeout=PATIENCE).status_code == 200
    assert not [record for record in caplog.records if record.name == "mlxpool.gateway.access"]


# ---- ids -----------------------------------------------------------------------------------------


def test_every_answer_has_the_id_of_its_request(http: httpx.Client, pool: Pool) -> None:
    request_id = http.get("/health").headers["x-request-id"]
    assert len(request_id) == 32 and request_id != http.get("/health").headers["x-request-id"]
    for path in ("/v1/models", "/nowhere", "/api/tags", "/metrics", "/openapi.json"):
        answer = http.get(path, headers={"x-request-id": "abc-1"})
        assert answer.headers["x-request-id"] == "abc-1"
    insane = http.get("/nowhere", headers={"x-request-id": "a b"})
    assert insane.headers["x-request-id"] == insane.json()["error"]["request_id"] != "a b"
    headers = {"x-request-id": "abc-2"}
    with http.stream("POST", "/v1/completions", json=ENDLESS, headers=headers) as stream:
        assert stream.headers["x-request-id"] == "abc-2"
        lines = stream.iter_lines()
        ident = json.loads(next(lines).removeprefix("data: "))["id"].removeprefix("cmpl-")
        assert pool.cli("cancel", ident).returncode == 0
        (error,) = [line for line in lines if '"error"' in line]
    assert json.loads(error.removeprefix("data: "))["error"]["request_id"] == "abc-2"


# ---- metrics -------------------------------------------------------------------------------------


def values(text: str) -> dict[tuple[str, str, str], float]:
    """Returns the values of metrics by name, route, and status or cause."""
    return {
        (
            sample.name,
            sample.labels.get("route", ""),
            sample.labels.get("status", sample.labels.get("cause", "")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_requests_tokens_and_what_is_in_flight(http: httpx.Client) -> None:
    route, prefix = "/v1/completions", "mlxpool_gateway_"

    def at_rest() -> dict[tuple[str, str, str], float]:
        """Returns the metrics, or {} while a request to the route is in flight."""
        metrics = values(http.get("/metrics").text)
        return {} if metrics.get((prefix + "requests_in_flight", route, "")) else metrics

    before = until(at_rest, "no stream runs")
    body = {"model": "counting", "prompt": "hello", "max_tokens": 3}
    assert http.post(route, json=body).status_code == 200
    assert http.post(route, json={**body, "model": "none"}).status_code == 404
    with http.stream("POST", route, json=ENDLESS) as stream:
        lines = stream.iter_lines()  # deleting this iterator closes the connection
        next(lines)
        during = values(http.get("/metrics").text)

    def grown(name: str, status: str = "") -> float:
        key = (prefix + name, route, status)
        return float(during[key] - before.get(key, 0.0))

    assert grown("requests_in_flight") == 1
    assert (grown("requests_total", "200"), grown("requests_total", "404")) == (1, 1)
    assert (grown("prompt_tokens_total"), grown("generation_tokens_total")) == (5, 3)
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("request_duration_seconds_count") == 2
    assert during["process_resident_memory_bytes", "", ""] > 2**20
    after = until(at_rest, "the stream has ended")
    failures = (prefix + "stream_failures_total", route, "disconnect")
    assert after[failures] - before.get(failures, 0.0) == 1


def test_promtool_accepts_the_metrics(http: httpx.Client) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("missing program: promtool, of Debian's prometheus")
    text = http.get("/metrics").text
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_metrics_need_a_key_and_their_labels_are_bounded(http: httpx.Client) -> None:
    assert http.get("/metrics", headers={"authorization": ""}).status_code == 401
    for number in range(3):
        http.get(f"/nowhere/{number}")
        http.get(f"/v1/models/none-{number}")
        http.request(f"VERB{number}", "/v1/models")
    routes = {route for _, route, _ in values(http.get("/metrics").text)} - {""}
    assert routes <= {*(route.shown_path for route in ROUTES), *FURTHER_ROUTES}


# ---- CORS ----------------------------------------------------------------------------------------


def test_pages_of_an_allowed_origin_may_ask(http: httpx.Client) -> None:
    preflight = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = http.options("/v1/chat/completions", headers=preflight)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    answer = http.get("/v1/models", headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    denied = http.get("/v1/models", headers={"origin": ORIGIN, "authorization": "Bearer x"})
    assert denied.headers["access-control-allow-origin"] == ORIGIN, "so that the page can read it"
    foreign = http.options("/v1/models", headers={**preflight, "origin": "https://evil.example"})
    assert foreign.status_code == 400 and "access-control-allow-origin" not in foreign.headers
    other = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_without_the_setting_no_page_may_ask(pool: Pool) -> None:
    with GatewayThread(pool.run_dir) as plain:
        headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
        answer = httpx.options(f"{plain.url}/v1/completions", headers=headers, timeout=PATIENCE)
        assert not [name for name in answer.headers if name.startswith("access-control")]


# ---- openapi.json --------------------------------------------------------------------------------


HI = [{"role": "user", "content": "hi"}]
TEXTS = {"model": "demo-embed", "input": ["a", "b"]}
# path, body (None: GET)
ANSWERED: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("/v1/models", None),
    ("/v1/models/{name}", None),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "logprobs": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "logprobs": 1}),
    ("/v1/embeddings", TEXTS),
    ("/v1/embeddings", {**TEXTS, "encoding_format": "base64"}),
    ("/api/generate", {"prompt": "x", "options": {"num_predict": 2}, "logprobs": True}),
    ("/api/generate", {}),
    ("/api/chat", {"messages": HI, "options": {"num_predict": 2}}),
    ("/api/embed", TEXTS),
    ("/api/embeddings", {"model": "demo-embed", "prompt": "a"}),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/show", {}),
    ("/api/pull", {}),
    ("/api/version", None),
    ("/health", None),
    ("/openapi.json", None),
)


@pytest.mark.parametrize(("path", "body"), ANSWERED)
def test_answers_have_the_schema_of_the_document(
    http: httpx.Client, path: str, body: dict[str, Any] | None
) -> None:
    (route,) = [candidate for candidate in ROUTES if candidate.shown_path == path]
    asked = path.replace("{name}", "counting")
    if body is None:
        answer = http.get(asked)
        assert answer.status_code == 200 and not faults(answer.json(), route.answer)
        return
    whole = {"model": "counting", **body}
    if path.startswith("/api/") and not path.startswith(("/api/embed", "/api/show")):
        whole["stream"] = False
    assert route.body is not None and validator_of(route.body.schema()).is_valid(whole)
    answer = http.post(asked, json=whole)
    assert answer.status_code == 200 and not faults(answer.json(), route.answer)
    schema = {"$ref": f"#/components/schemas/{route.answer}"}
    assert not list(unknown_members(answer.json(), schema))
    if route.stream is None:
        return
    text = http.post(asked, json={**whole, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert events and not [fault for event in events for fault in faults(event, route.event)]


def test_errors_have_the_schema_of_the_document(http: httpx.Client) -> None:
    for path, schema in (("/v1/completions", "Error"), ("/api/generate", "OllamaError")):
        answer = http.post(path, json={"model": "none", "prompt": "x"})
        assert answer.status_code == 404 and not faults(answer.json(), schema)


def test_the_document_needs_no_key(gateway: GatewayThread) -> None:
    answer = httpx.get(f"{gateway.url}/openapi.json", timeout=PATIENCE)
    validate(answer.json())
    assert set(answer.json()["paths"]) == {route.shown_path for route in ROUTES}


# ---- drain ---------------------------------------------------------------------------------------


def is_draining(url: str) -> bool:
    answer = httpx.get(f"{url}/health", timeout=PATIENCE)
    return answer.status_code == 503 and answer.json() == {"status": "draining"}


def test_a_draining_gateway_finishes_its_streams_and_refuses_new_requests(
    pool: Pool, tmp_path: Path
) -> None:
    with serving(pool, tmp_path / "log", "--drain-timeout", "600") as (process, url):
        body = {**ENDLESS, "max_tokens": 300}  # takes 6 s, enough time for the other requests
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: is_draining(url), "the drain has begun")
            refused = httpx.post(f"{url}/v1/completions", json=ENDLESS, timeout=PATIENCE)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "draining"
            assert refused.headers["connection"] == "close"
            answer = httpx.get(f"{url}/api/tags", timeout=PATIENCE)
            assert answer.status_code == 503 and "draining" in answer.json()["error"]
            shown = values(httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
            assert shown["mlxpool_gateway_draining", "", ""] == 1
            assert [*lines][-2] == "data: [DONE]", "the stream is whole"
        assert process.wait(PATIENCE) == 0
    log = (tmp_path / "log").read_text()
    assert "draining" in log and "drained" in log and "Traceback" not in log


def test_ctrl_c_drains_too(pool: Pool, tmp_path: Path) -> None:
    with serving(pool, tmp_path / "log") as (process, url):
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_health_is_503_while_the_pool_takes_no_requests(tmp_path: Path) -> None:
    config = '[models.slow]\npath = "builtin:counting"\ncounting.step_us = 20000\n'
    with Pool(tmp_path, config) as own, GatewayThread(own.run_dir) as running:
        body = {**ENDLESS, "model": "slow"}
        url = f"{running.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            health = httpx.get(f"{running.url}/health", timeout=PATIENCE)
            assert (health.status_code, health.json()) == (200, {"status": "ok"})
            assert own.cli("drain", "--timeout", "600").returncode == 0
            until(lambda: is_draining(running.url), "health says that the pool drains")
            refused = httpx.post(url, json=body, timeout=PATIENCE)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert next(lines) is not None, "the stream goes on"
