"""Invalid HTTP requests to a gateway, and a gateway without a pool."""

from __future__ import annotations

import gzip
import json
import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from support.gateway_process import serving
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until
from support.secret_file import secret_file

KEY, OTHER = "k" * 32, "o" * 32
CONFIG = """
[models.loading]
path = "builtin:counting"
counting.load_ms = 3600000
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
[models.unloadable]
path = "builtin:counting"
counting.fault = "raise"
counting.fault_in = "load"
"""
CHAT = {"model": "counting", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
MAX_BODY = 2000  # bytes


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = secret_file(tmp_path_factory.mktemp("keys") / "keys", f"# who may ask\n{KEY}\n\n")
    return file


@pytest.fixture(scope="module")
def gateway(pool: Pool, keys: Path) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir, keys=keys, max_body=MAX_BODY) as running:
        yield running


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE) as new_client:
        yield new_client


@pytest.fixture(scope="module")
def roomy(pool: Pool) -> Iterator[httpx.Client]:
    """A client of a gateway that takes large bodies."""
    with (
        GatewayThread(pool.run_dir) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE) as new_client,
    ):
        yield new_client


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Asserts an error in OpenAI's form and returns it."""
    error: dict[str, Any] = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    return error


def test_keys(http: httpx.Client) -> None:
    assert http.get("/v1/models").status_code == 200
    for given in (f"Bearer {OTHER}", KEY, f"Basic {KEY}", "", "Bearer", f"Bearer {KEY}x"):
        response = http.get("/v1/models", headers={"authorization": given})
        refused(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert (
        http.get("/api/tags", headers={"authorization": ""}).json()["error"].startswith("a valid")
    )
    assert http.get("/health", headers={"authorization": ""}).json() == {"status": "ok"}


def test_without_keys_other_host_names_are_refused(pool: Pool, http: httpx.Client) -> None:
    with GatewayThread(pool.run_dir) as gateway:
        url = f"{gateway.url}/v1/models"
        for host in ("elsewhere.example:80", "[::2]", ":"):
            refused(
                httpx.get(url, headers={"host": host}, timeout=PATIENCE), 403, "host_not_allowed"
            )
        for host in ("localhost.:80", "[::1]:80", "10.0.0.1", "host.docker.internal:11434"):
            assert httpx.get(url, headers={"host": host}, timeout=PATIENCE).status_code == 200
        headers = {"host": "a.local", "origin": "http://a.local"}
        refused(httpx.get(url, headers=headers, timeout=PATIENCE), 403, "host_not_allowed")
    assert http.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 200


def test_the_concurrent_requests_of_a_key_are_bounded(pool: Pool) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 10**6, "stream": True}
    with GatewayThread(pool.run_dir, per_key=1) as gateway:
        url = f"{gateway.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()  # deleting this iterator closes the connection
            next(lines)
            response = httpx.post(url, json=body, timeout=PATIENCE)
            refused(response, 429, "over_quota")
            assert response.headers["retry-after"] == "1"
        models = f"{gateway.url}/v1/models"
        until(lambda: httpx.get(models, timeout=PATIENCE).status_code == 200, "its place is free")


def test_a_body_too_large_with_and_without_its_length(http: httpx.Client) -> None:
    data = b'{"x": "' + b"y" * MAX_BODY + b'"}'
    headers = {"content-type": "application/json"}

    def pieces() -> Iterator[bytes]:
        yield data[:500]
        yield data[500:]

    for content in (data, pieces()):
        response = http.post("/v1/chat/completions", content=content, headers=headers)
        said = refused(response, 413, "body_too_large")["message"]
        assert f"at most {MAX_BODY}" in said and "--max-body" in said


def test_a_body_that_does_not_arrive(pool: Pool) -> None:
    with GatewayThread(pool.run_dir, body_time=0.1) as gateway:
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        with socket.create_connection((host, int(port)), PATIENCE) as peer:
            peer.sendall(head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{")
            assert b"body_too_slow" in b"".join(iter(lambda: peer.recv(4096), b""))


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"not JSON", 400, "not_json"),
        (b"", 400, "not_json"),
        (b"[1]", 400, "not_json"),
        (b"[" * 1500, 400, "not_json"),
        (b"\xff\xfe", 400, "not_json"),
        (b"{}", 400, "bad_request"),
    ],
)
def test_an_invalid_body(http: httpx.Client, data: bytes, status: int, code: str) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    refused(http.post("/v1/chat/completions", content=data, headers=headers), status, code)


@pytest.mark.parametrize(
    "kind",
    ["", "APPLICATION/JSON;charset=UTF-8", "text/json", "application/vnd.api+json",
     "application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "application/octet-stream"],
)  # fmt: skip
def test_content_types_of_programs(http: httpx.Client, kind: str) -> None:
    content = json.dumps({**CHAT, "max_tokens": 1}).encode()
    headers = {"content-type": kind} if kind else {}
    response = http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200, response.text
    if not kind.lower().endswith(("json", "utf-8")):
        headers |= {"origin": "http://127.0.0.1", "sec-fetch-site": "same-origin"}
        assert http.post("/v1/messages", content=content, headers=headers).status_code in (403, 415)


def test_a_compressed_body(http: httpx.Client) -> None:
    def post(content: bytes, coding: str) -> httpx.Response:
        headers = {"content-type": "application/json", "content-encoding": coding}
        return http.post("/v1/chat/completions", content=content, headers=headers)

    data = json.dumps({**CHAT, "max_tokens": 1}).encode()
    for coding, encode in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        assert post(encode(data), coding).status_code == 200
        refused(post(encode(data)[:-3], coding), 400, "broken_encoding")
        bomb = encode(b'{"x": "' + b"y" * 10 * MAX_BODY + b'"}')
        assert len(bomb) < MAX_BODY
        refused(post(bomb, coding), 413, "body_too_large")
    answer = post(data, "br")
    assert "gzip, deflate, zstd" in refused(answer, 415, "unsupported_encoding")["message"]


def test_a_pool_that_keeps_no_jobs_answers_a_key_as_always(http: httpx.Client) -> None:
    body = {**CHAT, "stream": True}
    key = {"idempotency-key": "k"}
    answer = http.post("/v1/chat/completions", json=body, headers=key)
    assert "[DONE]" in answer.text and "id: 1\n" not in answer.text
    again = http.post("/v1/chat/completions", json=body, headers={**key, "last-event-id": "1"})
    refused(again, 501, "jobs_off")


def test_another_content_type(http: httpx.Client) -> None:
    headers = {"content-type": "text/html"}
    response = http.post("/v1/chat/completions", content=b"{}", headers=headers)
    refused(response, 415, "unsupported_media_type")


def test_an_unsupported_field_is_named(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, "temprature": 1})
    assert refused(response, 400, "unknown_parameter")["param"] == "temprature"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("prompt", [None, "", [""]])
def test_an_empty_prompt_is_refused_where_no_token_stands_in_front(
    http: httpx.Client, prompt: object
) -> None:
    response = http.post("/v1/completions", json={"model": "counting", "prompt": prompt})
    assert "the model puts none in front" in refused(response, 400, "bad_request")["message"]


@pytest.mark.parametrize("depth", [100, 600, 5000, 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_deeply_nested_body(roomy: httpx.Client, path: str, depth: int) -> None:
    message = {"role": "user", "content": "x", "more": "DEEP"}
    content = json.dumps({"model": "counting", "messages": [message]})
    content = content.replace('"DEEP"', "[" * depth + "]" * depth)
    headers = {"content-type": "application/json"}
    response = roomy.post(path, content=content, headers=headers)
    assert response.status_code == 400 and "error" in response.json(), response.text


@pytest.mark.parametrize("digits", [30, 400, 4400])
@pytest.mark.parametrize(
    "field",
    ['"seed": HUGE', '"max_tokens": HUGE', '"temperature": HUGE', '"logit_bias": {"1": HUGE}'],
)
def test_an_integer_of_many_digits(roomy: httpx.Client, field: str, digits: int) -> None:
    content = '{"model": "counting", "prompt": "x", FIELD}'.replace("FIELD", field)
    content = content.replace("HUGE", "1" * digits)
    headers = {"content-type": "application/json"}
    response = roomy.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400 and "error" in response.json(), response.text


def test_an_unknown_model_and_an_unknown_path(http: httpx.Client) -> None:
    for path, body in [
        ("/v1/chat/completions", {**CHAT, "model": "none"}),
        ("/v1/completions", {"model": "none", "prompt": "x"}),
    ]:
        assert refused(http.post(path, json=body), 404, "model_not_found")["param"] == "model"
    refused(http.get("/v1/nothing"), 404, "unknown_url")
    refused(http.get("/v1/completions"), 405, "method_not_allowed")
    refused(http.post("/v1/moderations", json={}), 501, "not_supported")


def test_a_deadline_that_passes_before_the_model_is_loaded(pool: Pool) -> None:
    body = {"model": "loading", "prompt": "x"}
    with GatewayThread(pool.run_dir, deadline=0.1) as gateway:
        response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE)
        refused(response, 503, "model_loading")
    assert response.json()["load_progress"] == 0.0 and response.headers["retry-after"] == "1"


def test_a_deadline_that_passes(pool: Pool) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 10**6}
    with pool.client() as client:
        client.tokenize("slow", "")  # loads the model
    with GatewayThread(pool.run_dir, deadline=0.1) as gateway:
        response = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=PATIENCE)
        refused(response, 504, "deadline_exceeded")


def test_a_model_that_cannot_be_loaded(http: httpx.Client) -> None:
    body = {"model": "unloadable", "prompt": "x"}
    refused(http.post("/v1/completions", json=body), 503, "model_load_failed")


def test_no_broker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlxpool.gateway")
    with GatewayThread(tmp_path, broker_grace=0.5) as gateway:
        response = httpx.post(f"{gateway.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE)
        refused(response, 503, "broker_lost")
        health = httpx.get(f"{gateway.url}/health", timeout=PATIENCE)
        assert health.status_code == 503 and f"ipc://{tmp_path}/front.ipc" in health.text

        def said() -> list[logging.LogRecord]:
            """Returns the records of the log, except those of the access log."""
            return [record for record in caplog.records if record.name == "mlxpool.gateway"]

        until(lambda: len(said()) > 1, "the log has what became of it")
    begun, missing = said()[:2]
    assert begun.message == "asking for a broker" and missing.message.startswith("no broker yet")
    assert vars(missing)["endpoint"] == f"ipc://{tmp_path}/front.ipc"


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_serves_rereads_its_keys_and_ends(pool: Pool, tmp_path: Path) -> None:
    keys = secret_file(tmp_path / "keys", KEY)
    with serving(pool, tmp_path / "log", "--keys", str(keys)) as (process, url):
        headers = {"authorization": f"Bearer {OTHER}"}

        def status() -> int:
            return httpx.get(f"{url}/v1/models", headers=headers, timeout=PATIENCE).status_code

        assert status() == 401
        keys.write_text(OTHER)
        process.send_signal(signal.SIGHUP)
        until(lambda: status() == 200, "the new key is known")
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_disconnect_during_the_body_is_not_logged(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    with GatewayThread(pool.run_dir) as gateway:
        host, port = gateway.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n"
        with socket.create_connection((host, int(port)), PATIENCE) as peer:
            peer.sendall((head + "Content-Type: application/json\r\n\r\n{}").encode())
        assert httpx.get(f"{gateway.url}/v1/models", timeout=PATIENCE).status_code == 200
    assert "failed" not in caplog.text


def refused_command(*arguments: str) -> tuple[int, str]:
    """Returns the exit code and the error output of a gateway that does not start."""
    command = [sys.executable, "-m", "mlxpool.cli.main", "gateway", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "give the file of accepted keys with --keys FILE"),
        (["--port", "70000"], "port is 70000, must be from 0 to 65535"),
        (["--keys", "/nowhere/keys"], "the keys in /nowhere/keys cannot be read"),
    ],
)
def test_invalid_arguments(arguments: list[str], words: str) -> None:
    code, said = refused_command(*arguments)
    assert code == 2 and words in said


def test_a_port_in_use(gateway: GatewayThread) -> None:
    port = gateway.url.rpartition(":")[2]
    code, said = refused_command("--port", port)
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
