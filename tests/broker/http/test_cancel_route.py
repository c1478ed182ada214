"""`POST /cancel` of the broker's HTTP server; the test replaces the broker's loop."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from select import select
from threading import Event, Thread
from typing import Any

import pytest

from mlxpool.broker.http import operator_routes
from mlxpool.broker.http.loop_exchange import Fate
from mlxpool.broker.http.server import MAX_CONNECTIONS, HttpServer, Stage
from mlxpool.common.config.bounds import host_port
from mlxpool.common.errors import BadRequest
from support.pool import PATIENCE, until

TOKEN = "t" * 32
DIGEST = hashlib.sha256(TOKEN.encode()).digest()
ID = "055702648118"


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """Makes a server that waits for the loop and for clients as long as a busy machine needs."""
    with HttpServer("127.0.0.1:0", 3600.0, DIGEST) as running:
        assert running.cancels is not None
        running.cancels.max_wait = running.connections.max_seconds = PATIENCE
        yield running


@pytest.fixture
def cancelled(server: HttpServer) -> Iterator[list[str]]:
    """Runs a thread in place of the broker's loop; yields the prefixes that it was asked to cancel.

    The request with the prefix "0" * 8 has ended.
    """
    prefixes: list[str] = []
    over, queue = Event(), server.cancels
    assert queue is not None

    def cancel(prefix: str, now: float) -> Fate:
        if prefix == "0" * 8:
            raise BadRequest("it has ended")
        prefixes.append(prefix)
        return {"state": "streaming", "pos": 3}

    def turn() -> None:
        while not over.is_set():
            if select([queue.waker], [], [], 0.01)[0]:
                queue.serve(cancel, 0.0)

    thread = Thread(target=turn)
    thread.start()
    yield prefixes
    over.set()
    thread.join()


def post(
    server: HttpServer,
    body: bytes = json.dumps({"id": ID}).encode(),
    path: str = "/cancel",
    changed: Mapping[str, str] | None = None,
) -> tuple[int, Any, Mapping[str, str]]:
    """Returns status, body and headers of the answer to a request as the page sends it."""
    headers = {
        "Origin": server.url,
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        **(changed or {}),
    }
    asked = urllib.request.Request(server.url + path, body, headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode()
            content = json.loads(text) if text.startswith("{") else text
            return error.code, content, dict(error.headers)


def test_an_operator_cancels(server: HttpServer, cancelled: list[str]) -> None:
    status, answer, headers = post(server)
    assert (status, answer) == (200, {"state": "streaming", "pos": 3})
    assert cancelled == [ID]
    assert "Access-Control-Allow-Origin" not in headers


def test_a_cancel_is_logged_with_the_id_and_the_address(
    server: HttpServer, cancelled: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlxpool.broker"):
        post(server)
    lines = [vars(record) for record in caplog.records if record.message.startswith("cancel asked")]
    assert [(line["id"], line["address"]) for line in lines] == [(ID, "127.0.0.1")]


def test_the_reason_of_the_loop_is_told(server: HttpServer, cancelled: list[str]) -> None:
    assert post(server, b'{"id": "00000000"}')[:2] == (409, {"error": "it has ended"})


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example:9464"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_nothing_is_cancelled_when_a_header_is_wrong(
    server: HttpServer, cancelled: list[str], changed: dict[str, str], status: int
) -> None:
    actual, answer, _ = post(server, changed=changed)
    assert actual == status and answer["error"]
    assert cancelled == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b'{"id": 5}', b'{"id": "05"}', b'{"id": "XYZ45678"}', b"\xff",
     b'{"id": "05570264/../"}', json.dumps({"id": "0" * 33}).encode()],
)  # fmt: skip
def test_a_body_that_names_no_request_is_refused(
    server: HttpServer, cancelled: list[str], body: bytes
) -> None:
    status, answer, _ = post(server, body)
    assert status == 400 and "hexadecimal digits" in answer["error"]
    assert cancelled == []


@pytest.mark.parametrize("length", ["257", "1000000", "9" * 5000, "-1", "x"])
def test_a_body_without_a_bound_is_not_read(
    server: HttpServer, cancelled: list[str], length: str
) -> None:
    status, answer, _ = post(server, changed={"Content-Length": length})
    assert status == 413 and "at most 256 bytes" in answer["error"]


def test_a_loop_that_is_stuck_cancels_nothing_later(server: HttpServer) -> None:
    assert server.cancels is not None
    server.cancels.max_wait = 0.05
    status, answer, _ = post(server)
    assert (status, answer) == (503, {"error": "the broker's loop has not answered for 0.05 s"})


def test_without_a_token_there_is_no_cancel() -> None:
    with HttpServer("127.0.0.1:0", 3600.0) as server:
        status, answer, _ = post(server)
    assert status == 404 and "pool.metrics_admin_token" in answer


def test_other_paths_take_no_post(server: HttpServer, cancelled: list[str]) -> None:
    status, answer, _ = post(server, path="/metrics")
    assert (status, answer) == (405, "only /cancel, /jobs, /log take POST, not '/metrics'\n")


def test_a_browser_may_not_ask_from_elsewhere(server: HttpServer) -> None:
    """The preflight request of a page of another origin (CORS) is refused."""
    asked = urllib.request.Request(server.url + "/cancel", method="OPTIONS")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=PATIENCE)
    with refused.value as error:
        assert error.code == 501
        assert not any(name.lower().startswith("access-control") for name in error.headers)


def test_refusals_are_logged_without_the_token_and_not_in_a_flood(
    server: HttpServer,
    cancelled: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(operator_routes, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.WARNING, "mlxpool.broker"):
        for later in (0.0, 0.1, 0.2, 0.9, operator_routes.LOG_INTERVAL):
            clock[0] = 100.0 + later
            post(server, changed={"Authorization": "Bearer secret-guess"})
    lines = [vars(record) for record in caplog.records if record.message == "cancel refused"]
    assert [(line["address"], line["untold"]) for line in lines] == [
        ("127.0.0.1", 0),
        ("127.0.0.1", 3),
    ]
    assert "secret-guess" not in caplog.text


def test_a_crowd_does_not_end_a_cancel_that_waits_for_the_loop(server: HttpServer) -> None:
    """New connections do not displace a connection whose cancel waits for the loop."""
    queue, statuses = server.cancels, list[int]()
    assert queue is not None
    queue.max_wait = 60.0
    thread = Thread(target=lambda: statuses.append(post(server)[0]))
    thread.start()
    until(lambda: server.connections.count(Stage.ANSWER) == 1, "it waits")
    with ExitStack() as crowd:
        address = host_port(server.url.removeprefix("http://"))
        for _ in range(2 * MAX_CONNECTIONS):
            crowd.enter_context(socket.create_connection(address, timeout=PATIENCE))
        until(lambda: len(server.connections) == MAX_CONNECTIONS, "there is no room")
        until(lambda: select([queue.waker], [], [], 0)[0], "the loop is woken")
        queue.serve(lambda prefix, now: {"state": "streaming"}, 0.0)
        thread.join()
    assert statuses == [200]
