"""The broker's HTTP server; the test replaces the broker's loop."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from select import select

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from mlxpool.broker.http import routes
from mlxpool.broker.http.routes import PAGE
from mlxpool.broker.http.server import MAX_CONNECTIONS, SWITCH_INTERVAL, HttpServer, Stage
from mlxpool.broker.telemetry.reports import stats
from mlxpool.common.config.bounds import ConfigError, host_port
from mlxpool.common.config.loading import load
from support import snapshots
from support.core_harness import Story
from support.pool import PATIENCE, until
from support.web_loop import Loop


@pytest.fixture
def server() -> Iterator[HttpServer]:
    """Makes a server that asks the loop nothing by itself, and waits for it as long as needed."""
    with HttpServer("127.0.0.1:0", history_interval=3600.0) as running:
        running.latest.max_wait = PATIENCE
        running.connections.max_seconds = PATIENCE
        yield running


@pytest.fixture
def loop(server: HttpServer, story: Story) -> Iterator[Loop]:
    with Loop(server, snapshots.of(story)) as running:
        yield running


def get(server: HttpServer, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Returns status, content type and body."""
    request = urllib.request.Request(server.url + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics_are_answered_in_prometheus_format(server: HttpServer, loop: Loop) -> None:
    status, kind, text = get(server, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "mlxpool_build_info" in {m.name for m in text_string_to_metric_families(text)}


def get_as(server: HttpServer, lines: bytes) -> bytes:
    """Returns the complete answer to a GET of the page with these header lines."""
    host, port = host_port(server.url.removeprefix("http://"))
    with socket.create_connection((host, port), PATIENCE) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
        said = b""
        while piece := connection.recv(65536):
            said += piece
    return said


@pytest.mark.parametrize("host", [b"evil.example", b"evil.example:80", b"10.0.0.1", b"", b"[::2]"])
def test_a_page_of_another_name_reads_nothing(server: HttpServer, host: bytes) -> None:
    """A foreign host name is refused, as it may resolve to this server (DNS rebinding)."""
    said = get_as(server, b"Host: " + host + b"\r\n")
    assert said.startswith(b"HTTP/1.0 403 ") and b"is not this machine's loopback address" in said
    assert b"<html" not in said


@pytest.mark.parametrize("lines", [b"", b"Host: localhost:1\r\n", b"Host: [::1]:80\r\n"])
def test_a_loopback_name_or_none_reads_the_page(server: HttpServer, lines: bytes) -> None:
    assert get_as(server, lines).startswith(b"HTTP/1.0 200 ")


def test_an_open_address_is_asked_by_any_name() -> None:
    with HttpServer("0.0.0.0:0", history_interval=3600.0) as server:
        assert get_as(server, b"Host: pool.example\r\n").startswith(b"HTTP/1.0 200 ")


def test_stats_are_those_of_the_admin(server: HttpServer, loop: Loop) -> None:
    status, kind, text = get(server, "/stats")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == stats(loop.snapshot)


def test_healthz_is_ok_while_the_loop_runs(server: HttpServer, loop: Loop) -> None:
    assert get(server, "/healthz")[::2] == (200, "ok\n")
    assert get(server, "/readyz")[::2] == (200, "ready\n")


@pytest.mark.parametrize("state", ["draining", "stopping"])
def test_a_broker_that_drains_is_healthy_and_not_ready(
    server: HttpServer, story: Story, state: str
) -> None:
    with Loop(server, snapshots.of(story, state=state)):
        assert get(server, "/healthz")[0] == 200
        assert get(server, "/readyz")[::2] == (503, f"{state}\n")
        assert get(server, "/metrics")[0] == 200


def test_not_ready_while_no_model_can_be_had(server: HttpServer, story: Story) -> None:
    taken = snapshots.of(story)
    models = tuple(replace(each, available=False, state="broken") for each in taken.models)
    with Loop(server, replace(taken, models=models)):
        status, _, text = get(server, "/readyz")
    assert status == 503
    assert text == "no model can be had: m is broken, other is broken\n"


def test_an_unknown_path_is_not_found(server: HttpServer, loop: Loop) -> None:
    status, _, text = get(server, "/metric")
    assert status == 404
    assert "'/metric'" in text and "/, /metrics, /healthz, /readyz, /stats, /status.json" in text
    assert loop.left == 0, "the loop was bothered"


def test_a_query_is_no_part_of_the_path(server: HttpServer, loop: Loop) -> None:
    assert get(server, "/healthz?verbose=1")[0] == 200


def test_head_has_no_body(server: HttpServer, loop: Loop) -> None:
    status, kind, text = get(server, "/metrics", "HEAD")
    assert (status, text) == (200, "")
    assert kind.startswith("text/plain")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS"])
def test_methods_other_than_get_head_and_post_are_refused(
    server: HttpServer, loop: Loop, method: str
) -> None:
    assert get(server, "/metrics", method)[0] == 501
    assert loop.left == 0


def test_many_scrapes_share_one_snapshot(server: HttpServer, loop: Loop) -> None:
    server.latest.fresh = 3600.0
    for _ in range(20):
        assert get(server, "/metrics")[0] == 200
    assert loop.left == 1


def test_an_old_snapshot_is_not_given_out(server: HttpServer, loop: Loop) -> None:
    server.latest.fresh = 0.0
    for count in (1, 2, 3):
        assert get(server, "/metrics")[0] == 200
        assert loop.left == count


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/stats", "/status.json"])
def test_a_loop_that_is_stuck_is_reported(server: HttpServer, loop: Loop, path: str) -> None:
    server.latest.fresh = 0.0
    server.latest.max_wait = 0.05
    loop.turning = False
    status, _, text = get(server, path)
    assert (status, text) == (503, "the broker's loop has not answered for 0.05 s\n")
    server.latest.max_wait = PATIENCE
    loop.turning = True
    assert get(server, path)[0] == 200


def connect(server: HttpServer, said: bytes = b"") -> socket.socket:
    """Opens a connection that sends this data and then waits."""
    peer = socket.create_connection(host_port(server.url.removeprefix("http://")), timeout=PATIENCE)
    peer.sendall(said)
    return peer


def test_a_crowd_that_says_nothing_keeps_nobody_out(server: HttpServer, loop: Loop) -> None:
    with ExitStack() as silent:
        crowd = [silent.enter_context(connect(server)) for _ in range(3 * MAX_CONNECTIONS)]
        for path in ("/healthz", "/metrics", "/healthz"):
            assert get(server, path)[0] == 200
        assert crowd[0].recv(1) == b"", "the oldest was shut"


def test_a_crowd_that_says_too_little_keeps_nobody_out(server: HttpServer, loop: Loop) -> None:
    with ExitStack() as slow:
        for _ in range(2 * MAX_CONNECTIONS):
            slow.enter_context(connect(server, b"GET /healthz HTTP/1.0\r\nX-Slow: "))
        assert get(server, "/healthz")[0] == 200


def test_a_connection_that_does_not_read_its_answer_is_closed(
    server: HttpServer, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that do not read their large answers are disconnected, so that others are served."""
    answer = (HTTPStatus.OK, "text/plain", bytes(32 * 1024 * 1024))
    monkeypatch.setitem(routes.PATHS, "/metrics", lambda renderers, snapshot: answer)
    with ExitStack() as greedy:
        for _ in range(2 * MAX_CONNECTIONS):
            greedy.enter_context(connect(server, b"GET /metrics HTTP/1.0\r\n\r\n"))
        assert get(server, "/healthz")[0] == 200


def test_while_all_wait_for_the_loop_a_further_one_is_turned_away(
    server: HttpServer, loop: Loop
) -> None:
    """All connections wait for the loop: none is closed, and a further one is refused."""
    server.latest.max_wait = PATIENCE
    loop.turning = False
    with ExitStack() as waiting:
        peers = [
            waiting.enter_context(connect(server, b"GET /stats HTTP/1.0\r\n\r\n"))
            for _ in range(MAX_CONNECTIONS)
        ]
        until(lambda: server.connections.count(Stage.ANSWER) == len(peers), "all wait")
        with connect(server) as further:
            assert further.recv(1) == b""
        loop.turning = True
        for peer in peers:
            assert peer.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"


def test_a_slow_connection_has_its_time(server: HttpServer, loop: Loop) -> None:
    server.connections.max_seconds = 0.0
    with connect(server, b"GET /hea") as peer:
        assert peer.recv(1) == b""
    until(lambda: not len(server.connections), "it is counted no more")


def test_the_status_page_is_served(server: HttpServer, loop: Loop) -> None:
    with urllib.request.urlopen(server.url, timeout=PATIENCE) as answer:
        assert answer.read() == PAGE
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert loop.left == 0, "the loop was bothered"


def test_the_status_page_is_served_while_the_loop_is_stuck(server: HttpServer, loop: Loop) -> None:
    loop.turning = False
    assert get(server, "/")[0] == 200


def test_status_json_has_the_figures_of_the_pool(server: HttpServer, loop: Loop) -> None:
    status, kind, text = get(server, "/status.json")
    assert (status, kind) == (200, "application/json")
    assert [model["name"] for model in json.loads(text)["models"]] == ["m", "other"]


def test_the_past_is_noted_while_nobody_looks(story: Story) -> None:
    with (
        HttpServer("127.0.0.1:0", history_interval=0.01) as server,
        Loop(server, snapshots.of(story)),
    ):
        until(lambda: len(server.history.points) > 2, "points")


def test_the_past_goes_on_after_a_stuck_loop(story: Story) -> None:
    with (
        HttpServer("127.0.0.1:0", history_interval=0.01) as server,
        Loop(server, snapshots.of(story)) as loop,
    ):
        server.latest.max_wait, server.latest.fresh = 0.01, 0.0
        points = server.history.points
        until(lambda: len(points) > 2, "points")
        loop.turning = False
        assert get(server, "/healthz")[0] == 503
        loop.turning = True
        before = len(points)
        until(lambda: len(points) > before, "further points")


def test_close_does_not_wait_for_the_loop(server: HttpServer) -> None:
    """The loop itself closes the server, so closing must not wait for requests to the loop."""
    server.latest.max_wait = 3600.0
    with connect(server, b"GET /stats HTTP/1.0\r\n\r\n") as peer:
        until(
            lambda: server.latest.waker in select([server.latest.waker], [], [], 0)[0], "it waits"
        )
        server.close()
        assert peer.makefile("rb").read().endswith(b"the broker is ending\n")


@pytest.mark.parametrize("junk", [b"\r\n\r\n", b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"x" * 70_000])
def test_junk_on_a_connection_ends_that_connection_alone(
    server: HttpServer, loop: Loop, junk: bytes
) -> None:
    host, port = host_port(server.url.removeprefix("http://"))
    with socket.create_connection((host, port)) as peer:
        peer.sendall(junk)
    assert get(server, "/healthz")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: .* another port"):
            HttpServer(address)


def test_close_leaves_no_thread_and_no_socket(story: Story) -> None:
    before = sys.getswitchinterval()
    with HttpServer("127.0.0.1:0") as server:
        url = server.url
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    assert sys.getswitchinterval() == before
    assert not {"web", "past"} & {thread.name for thread in threading.enumerate()}
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=PATIENCE)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_addresses_of_the_metrics_setting_are_parsed(text: str, parts: tuple[str, int]) -> None:
    assert host_port(text) == parts


@pytest.mark.parametrize(
    "text", ["9464", ":9464", "127.0.0.1", "127.0.0.1:65536", "::1:9464", "http://a:1", "a b:1"]
)
def test_a_malformed_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"pool\.metrics must be HOST:PORT such as"):
        host_port(text)


def test_a_wrong_address_is_a_wrong_setting(tmp_path: Path) -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text('[pool]\nmetrics = "9464"\n')
    with pytest.raises(ConfigError, match=r"pool\.metrics must be HOST:PORT .*, got '9464'"):
        load(file)


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mlxpool.toml"
    file.write_text('[pool]\nmetrics = "127.0.0.1:1"\n')
    monkeypatch.setenv("MLXPOOL_METRICS", "127.0.0.1:2")
    assert load(file).metrics == "127.0.0.1:2"
