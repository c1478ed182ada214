"""Connections without a request are closed, and displace no connection with a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from mlxpool.common.config.schema import PoolConfig
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.operation_routes import OperationRoutes
from mlxpool.gateway.operations import connections
from mlxpool.gateway.operations.connections import ACCEPT_FAILED, AcceptErrors, connection_limit
from mlxpool.gateway.settings import Settings
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, until

DESCRIPTORS = 192
PROGRAM = "import resource as r, sys; n = int(sys.argv.pop(1))\n" \
    "r.setrlimit(r.RLIMIT_NOFILE, (n, n))\n" \
    "from mlxpool.cli.main import main; sys.exit(main())"  # fmt: skip


def connect(url: str, stack: contextlib.ExitStack) -> socket.socket:
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 80), PATIENCE)
    return stack.enter_context(connection)


def ends(connection: socket.socket) -> bool:
    """Waits until the peer closes the connection. Returns False if the peer sends data instead."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def answer(url: str) -> int:
    return httpx.get(f"{url}/", timeout=PATIENCE).status_code


def ask(connection: socket.socket, url: str) -> None:
    """Sends a request, and reads the complete answer."""
    connection.sendall(head(url) + b"\r\n")
    said = b""
    while not said.endswith(b"is running"):
        piece = connection.recv(4096)
        assert piece, said
        said += piece


def head(url: str) -> bytes:
    return f"GET / HTTP/1.1\r\nhost: {httpx.URL(url).netloc.decode()}\r\n".encode()


def test_headers_that_do_not_arrive_end_the_connection(tmp_path: Path) -> None:
    with GatewayThread(tmp_path, header_time=0.2) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        connection.sendall(b"GET / HTTP/1.1\r\nhost: localho")
        assert ends(connection)


@pytest.mark.parametrize("asks", [False, True])
def test_a_connection_without_a_request_ends_after_the_idle_time(
    tmp_path: Path, asks: bool
) -> None:
    with GatewayThread(tmp_path, idle_time=0.2) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        if asks:
            ask(connection, gateway.url)
        assert ends(connection)


@pytest.mark.parametrize("asks", [False, True])
def test_a_connection_that_was_idle_takes_a_request(tmp_path: Path, asks: bool) -> None:
    """Like a load balancer, the client first keeps a connection idle for more than header_time."""
    with GatewayThread(tmp_path, header_time=0.1) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        if asks:
            ask(connection, gateway.url)
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(PATIENCE)
        ask(connection, gateway.url)


def test_connections_are_idle_longer_than_whatever_reuses_them() -> None:
    assert Settings().idle_time > 90 and PoolConfig().http_idle_time == Settings().idle_time


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_sends_nothing_more_gets_its_answers(tmp_path: Path, version: bytes) -> None:
    with GatewayThread(tmp_path) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        asked = head(gateway.url).replace(b"HTTP/1.1", b"HTTP/" + version) + b"\r\n"
        many = 1 if version == b"1.0" else 3
        connection.sendall(many * asked)
        connection.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: connection.recv(4096), b""))
    assert said.count(b"200 OK") == said.count(b"Ollama is running") == many


def test_a_client_that_sends_nothing_more_is_asked_whether_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FIRST_PROBE", 0.05)
    monkeypatch.setattr(connections, "SECOND_PROBE", 0.05)
    answers = threading.Event()

    async def slow(_: OperationRoutes, response: ResponseWriter) -> None:
        await asyncio.to_thread(answers.wait)
        await response.data(b"at last", "text/plain")

    monkeypatch.setattr(OperationRoutes, "index", slow)
    with GatewayThread(tmp_path) as gateway, contextlib.ExitStack() as stack:
        stack.callback(answers.set)
        here, gone, old = [connect(gateway.url, stack) for _ in range(3)]
        for each in (here, gone):
            each.sendall(head(gateway.url) + b"\r\n")
            each.shutdown(socket.SHUT_WR)
        old.sendall(head(gateway.url).replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n")
        old.shutdown(socket.SHUT_WR)
        assert here.recv(4096).startswith(b"HTTP/1.1 102 ") and ends(old)
        gone.close()
        until(lambda: gateway.open_connections == 1, "the one that is gone has ended")
        answers.set()
        said = b"".join(iter(lambda: here.recv(4096), b""))
    assert b"HTTP/1.1 200 OK" in said and said.endswith(b"at last")


@pytest.mark.parametrize(
    "asked",
    [
        b"\r\nGET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/none HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n\r\n",
    ],
)
def test_forms_of_requests_that_clients_send(tmp_path: Path, asked: bytes) -> None:
    with GatewayThread(tmp_path) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        connection.sendall(asked)
        said = connection.recv(4096)
    assert said.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 404 ")), said


def test_localhost_is_both_loopback_addresses(tmp_path: Path) -> None:
    with GatewayThread(tmp_path, host="localhost") as gateway:
        port = httpx.URL(gateway.url).port
        hosts = ["127.0.0.1", "localhost"]
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as ip6:
            ip6.bind(("::1", 0))
            hosts.append("[::1]")
        for host in hosts:
            assert answer(f"http://{host}:{port}") == 200


def test_the_headers_of_a_later_request_have_the_same_time(tmp_path: Path) -> None:
    with GatewayThread(tmp_path, header_time=1) as gateway, contextlib.ExitStack() as stack:
        connection = connect(gateway.url, stack)
        connection.sendall(head(gateway.url) + b"\r\n")
        assert b"200 OK" in connection.recv(4096)
        connection.sendall(head(gateway.url))
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass


def test_the_time_for_headers_does_not_concern_the_body(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayThread(tmp_path, header_time=1, body_time=1.5))
        connection = connect(gateway.url, stack)
        lines = b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{"
        path = head(gateway.url).replace(b"GET / ", b"POST /v1/completions ")
        connection.sendall(path + lines)
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


PREFLIGHT = b"OPTIONS / HTTP/1.1\r\norigin: https://a.example\r\naccess-control-request-method: GET"


@pytest.mark.parametrize(
    "asked",
    [
        b"POST /v1/completions HTTP/1.1",
        b"POST / HTTP/1.1",  # the route of / does not accept POST
        b"DELETE /v1/models HTTP/1.1",
        b"PURGE /nowhere HTTP/1.1",
        b"GET /health HTTP/1.1",
        PREFLIGHT,
    ],
)
def test_a_body_with_two_lengths_is_refused_and_its_connection_closed(
    tmp_path: Path, asked: bytes
) -> None:
    with (
        GatewayThread(tmp_path, cors_origins=("https://a.example",)) as gateway,
        contextlib.ExitStack() as stack,
    ):
        connection = connect(gateway.url, stack)
        lines = b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        start = head(gateway.url).replace(b"GET / HTTP/1.1", asked)
        connection.sendall(start + lines + head(gateway.url) + b"\r\n")
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                said += piece
    assert said.startswith(b"HTTP/1.1 400 ") and b"Transfer-Encoding and Content-Length" in said
    assert b"connection: close" in said and said.count(b"HTTP/1.1 ") == 1


def test_the_oldest_connection_without_a_request_is_closed_for_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(GatewayThread(tmp_path, max_connections=3))
        first, second, third = [connect(gateway.url, stack) for _ in range(3)]
        assert answer(gateway.url) == 200
        assert ends(first)
        for each in (second, third):
            each.sendall(head(gateway.url) + b"\r\n")
            assert b"200 OK" in each.recv(4096)
    assert (
        len([record for record in caplog.records if "3 connections are open" in record.message])
        == 1
    )


def test_a_connection_that_has_a_request_is_not_closed_for_a_new_one(tmp_path: Path) -> None:
    with GatewayThread(tmp_path, max_connections=1) as gateway, contextlib.ExitStack() as stack:
        busy = connect(gateway.url, stack)
        lines = (
            b"content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        )
        busy.sendall(head(gateway.url).replace(b"GET / ", b"POST /v1/completions ") + lines)
        assert b"100 Continue" in busy.recv(4096)
        refused = connect(gateway.url, stack)
        assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        busy.sendall(b"[]")
        assert busy.recv(4096).startswith(b"HTTP/1.1 400 ")


def test_more_idle_connections_than_descriptors_leave_the_gateway_answering(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr, contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", PROGRAM, str(DESCRIPTORS), "gateway"]
        process = subprocess.Popen(
            [*command, "--run-dir", str(tmp_path), "--port", "0"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env=dict(os.environ),
        )  # fmt: skip
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+:\d+", process.stdout.readline())
            assert match is not None
            for _ in range(2 * DESCRIPTORS):
                connect(match[0], stack)
            assert answer(match[0]) == 200
        finally:
            process.terminate()
            process.wait(PATIENCE)
            if process.stdout is not None:
                process.stdout.close()
    lines = log.read_text()
    assert "Traceback" not in lines and "connections are open, which is the most" in lines


def test_failures_to_accept_are_logged_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    try:
        handler = AcceptErrors()
        for _ in range(1000):
            handler(loop, {"message": ACCEPT_FAILED, "exception": OSError(24, "too many")})
        assert 1 <= len(caplog.records) <= 1000 // 2
        assert all(record.exc_info is None for record in caplog.records)
        with caplog.at_level(logging.ERROR):
            handler(loop, {"message": "something else"})
        assert "something else" in caplog.text
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("descriptors", "connections"), [(64, 16), (1024, 896), (10**9, 65536), (-1, 65536)]
)
def test_the_bound_leaves_descriptors_for_the_rest(descriptors: int, connections: int) -> None:
    assert connection_limit(descriptors) == connections
