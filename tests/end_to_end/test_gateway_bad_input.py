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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool, until

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
LONG: dict[str, Any] = {"max_tokens": 10**5}
MAX_BODY = 2000  # bytes


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool"), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.touch(0o600)
    file.write_text(f"# who may ask\n{KEY}\n\n")
    return file


@pytest.fixture(scope="module")
def gateway(pool: Pool, keys: Path) -> Iterator[GatewayThread]:
    with GatewayThread(pool.run_dir, keys=keys, max_body=MAX_BODY) as running:
        yield running


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE) as made:
        yield made


@pytest.fixture(scope="module")
def roomy(pool: Pool) -> Iterator[httpx.Client]:
    """A client of a gateway that takes large bodies."""
    with (
        GatewayThread(pool.run_dir) as running,
        httpx.Client(base_url=running.url, timeout=PATIENCE) as made,
    ):
        yield made


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Assert an error in OpenAI's form and return it."""
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
        http.get("/api/tags", headers={"authorization": ""}).json()["error"].startswith("a known")
    )
    assert http.get("/health", headers={"authorization": ""}).json() == {"status": "ok"}


def test_keys_are_reloaded_and_a_broken_file_changes_nothing(
    http: httpx.Client, gateway: GatewayThread, keys: Path
) -> None:
    other = {"authorization": f"Bearer {OTHER}"}
    keys.write_text(f"{KEY}\n{OTHER}\n")
    assert http.get("/v1/models", headers=other).status_code == 401
    gateway.gateway.keys.reload()
    assert http.get("/v1/models", headers=other).status_code == 200
    keys.write_text("short\n")
    gateway.gateway.keys.reload()
    assert http.get("/v1/models", headers=other).status_code == 200
    keys.write_text(KEY)
    gateway.gateway.keys.reload()
    assert http.get("/v1/models", headers=other).status_code == 401


def test_without_keys_other_host_names_are_refused(pool: Pool, http: httpx.Client) -> None:
    with GatewayThread(pool.run_dir) as gateway:
        url = f"{gateway.url}/v1/models"
        for host in (
            "elsewhere.example",
            "elsewhere.example:80",
            "127.0.0.1.elsewhere",
            "[::2]",
            "8.8.8.8",
            "localhost.elsewhere",
            "internal",
            ":",
        ):
            refused(
                httpx.get(url, headers={"host": host}, timeout=PATIENCE), 403, "host_not_allowed"
            )
        own = (
            "localhost",
            "localhost.:80",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "127.0.1.1",
            "0.0.0.0:1",
            "10.0.0.1",
            "host.docker.internal:11434",
        )
        for host in own:
            assert httpx.get(url, headers={"host": host}, timeout=PATIENCE).status_code == 200
        headers = {"host": "a.local", "origin": "http://a.local"}
        refused(httpx.get(url, headers=headers, timeout=PATIENCE), 403, "host_not_allowed")
    assert http.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 200


def test_the_concurrent_requests_of_a_key_are_bounded(pool: Pool) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 10**6, "stream": True}
    with GatewayThread(pool.run_dir, per_key=1) as gateway:
        url = f"{gateway.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()  # deleting it closes the connection
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


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"messages": []}, "messages", "bad_request"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", None),
        ({"model": 5}, "model", "bad_request"),
        ({"stream": "yes"}, "stream", "bad_request"),
        ({"stream_options": {"bogus": 1}}, "stream_options.bogus", "unknown_parameter"),
        ({"max_tokens": 0}, "max_tokens", "bad_request"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "bad_request"),
        ({"seed": -2}, "seed", "bad_request"),
        ({"n": 65}, "n", "bad_request"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "bad_request"),
        ({"stop": [5]}, "stop", "bad_request"),
        ({"min_tokens": 5}, "min_tokens", "unsupported_parameter"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "bad_request"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", "unknown_parameter"),
        ({"tools": [{"type": 5}]}, "tools", "bad_request"),
        ({"prompt": "x"}, "prompt", "unsupported_parameter"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "bad_request"),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
            None,
        ),
    ],
)
def test_an_unsupported_field_is_named(
    http: httpx.Client, change: dict[str, Any], param: str | None, code: str | None
) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert code in (None, error["code"])
    assert response.headers["x-should-retry"] == "false"


def test_neutral_values_are_accepted(http: httpx.Client) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "tools": None, "n": None,
        "tool_choice": "auto", "service_tier": "auto", "prompt_cache_key": "s", "stop": [""],
        "stream_options": {"include_usage": True}, "typical_p": 1, "keep_alive": "5m",
    }  # fmt: skip
    response = http.post("/v1/chat/completions", json={**CHAT, **harmless})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("prompt", [[], [1, "x"], [-1], 5, [[]], {"a": 1}])
def test_an_invalid_prompt(http: httpx.Client, prompt: object) -> None:
    response = http.post("/v1/completions", json={"model": "counting", "prompt": prompt})
    assert refused(response, 400, "bad_request")["param"] == "prompt"


@pytest.mark.parametrize("prompt", [None, "", [""]])
def test_an_empty_prompt_is_refused_where_no_token_stands_in_front(
    http: httpx.Client, prompt: object
) -> None:
    response = http.post("/v1/completions", json={"model": "counting", "prompt": prompt})
    assert "the model puts none in front" in refused(response, 400, "bad_request")["message"]


LONE_SURROGATE = "\\ud800"


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (
            "/v1/completions",
            f'{{"model": "counting", "prompt": "{LONE_SURROGATE}", "max_tokens": 1}}',
        ),
        ("/v1/completions", f'{{"model": "{LONE_SURROGATE}", "prompt": "x"}}'),
        ("/v1/completions", f'{{"model": "counting", "prompt": "x", "stop": "{LONE_SURROGATE}"}}'),
        ("/v1/completions", f'{{"model": "counting", "prompt": "x", "{LONE_SURROGATE}": 1}}'),
        ("/api/generate", f'{{"model": "{LONE_SURROGATE}", "prompt": "x"}}'),
        ("/api/show", f'{{"model": "{LONE_SURROGATE}"}}'),
    ],
)
def test_a_lone_surrogate(http: httpx.Client, path: str, data: str) -> None:
    headers = {"content-type": "application/json"}
    response = http.post(path, content=data.encode(), headers=headers)
    assert response.status_code in (200, 400, 404), response.text


@pytest.mark.parametrize("value", [2**70, [[[[]]]] * 9, float("nan"), {"a": {"b": 1}}])
def test_unknown_members_of_messages_must_be_serialisable(
    http: httpx.Client, value: object
) -> None:
    message = {"role": "user", "content": "x", "more": value}
    content = json.dumps({**CHAT, "messages": [message]})
    headers = {"content-type": "application/json"}
    response = http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code in (200, 400), response.text


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
        client.tokenize("slow", "")  # the model is loaded
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
            """What the log has beside the requests."""
            return [one for one in caplog.records if one.name == "mlxpool.gateway"]

        until(lambda: len(said()) > 1, "the log has what became of it")
    begun, missing = said()[:2]
    assert begun.message == "asking for a broker" and missing.message.startswith("no broker yet")
    assert vars(missing)["endpoint"] == f"ipc://{tmp_path}/front.ipc"


# ---- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlxpool.cli.main", *arguments]


@contextmanager
def serving(pool: Pool, log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a gateway in a process of its own meanwhile; yields the process and its URL."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command("--run-dir", str(pool.run_dir), "gateway", "--port", "0", *arguments),
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.communicate()


def test_the_command_serves_rereads_its_keys_and_ends(pool: Pool, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text(KEY)
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


# path, members of the request beside model and prompt
OUTLASTING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {**LONG, "stream": True}),
    ("/v1/completions", LONG),
    ("/api/generate", {"options": {"num_predict": 10**5}}),
)


def live(pool: Pool) -> set[str]:
    return {request["id"] for request in pool.ask("requests")["requests"]}


def test_requests_in_flight_at_shutdown_get_an_error(pool: Pool, tmp_path: Path) -> None:
    with serving(pool, tmp_path / "log", "--drain-timeout", "0") as (process, url):
        before = live(pool)
        with ThreadPoolExecutor(len(OUTLASTING)) as threads:
            answers = [
                threads.submit(
                    httpx.post,
                    url + path,
                    json={"model": "slow", "prompt": "x", **options},
                    timeout=PATIENCE,
                )
                for path, options in OUTLASTING
            ]
            until(lambda: len(live(pool) - before) == len(OUTLASTING), "all are asked")
            process.terminate()
            for answer in answers:  # each body is complete: httpx refuses half a body
                assert "the gateway is ending" in answer.result().text
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "its requests are cancelled")


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "name the keys that may ask with --keys FILE"),
        (["--port", "70000"], "port is 70000, must be from 0 to 65535"),
        (["--keys", "/nowhere/keys"], "the keys in /nowhere/keys cannot be read"),
    ],
)
def test_invalid_arguments(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        command("gateway", *arguments), capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr


def test_a_port_in_use(gateway: GatewayThread) -> None:
    port = gateway.url.rpartition(":")[2]
    done = subprocess.run(
        command("gateway", "--port", port), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
