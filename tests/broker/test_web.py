"""The broker's HTTP threads, with a loop of our own behind the desk."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from select import select

import pytest
from prometheus_client.parser import text_string_to_metric_families

import snapshots
from core_harness import Story
from mlxpool.broker import web
from mlxpool.broker.snapshot import Snapshot
from mlxpool.broker.web import Web
from mlxpool.common.closing import Closing
from mlxpool.common.config import ConfigError, host_port, load


class Loop(Closing):
    """Leaves a snapshot whenever the bell rings, while it is `turning`."""

    def __init__(self, server: Web, snapshot: Snapshot) -> None:
        self.server, self.snapshot = server, snapshot
        self.left = 0
        self.turning = True
        self.over = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        bell = self.server.desk.bell
        while not self.over:
            if select([bell], [], [], 0.01)[0] and self.turning:
                self.left += 1
                self.server.desk.leave(self.snapshot)

    def close(self) -> None:
        self.over = True
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Web]:
    with Web("127.0.0.1:0") as running:
        yield running


@pytest.fixture
def loop(server: Web, story: Story) -> Iterator[Loop]:
    with Loop(server, snapshots.of(story)) as running:
        yield running


def get(server: Web, path: str, method: str = "GET") -> tuple[int, str, str]:
    """Status, content type, body."""
    request = urllib.request.Request(server.url + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_metrics(server: Web, loop: Loop) -> None:
    status, kind, text = get(server, "/metrics")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "mlxpool_build_info" in {m.name for m in text_string_to_metric_families(text)}


def test_stats_are_those_of_the_admin(server: Web, loop: Loop) -> None:
    status, kind, text = get(server, "/stats")
    assert (status, kind) == (200, "application/json")
    assert json.loads(text) == loop.snapshot.stats


def test_health(server: Web, loop: Loop) -> None:
    assert get(server, "/healthz")[::2] == (200, "ok\n")
    assert get(server, "/readyz")[::2] == (200, "ready\n")


@pytest.mark.parametrize("state", ["draining", "stopping"])
def test_a_broker_that_drains_is_healthy_and_not_ready(
    server: Web, story: Story, state: str
) -> None:
    with Loop(server, snapshots.of(story, state=state)):
        assert get(server, "/healthz")[0] == 200
        assert get(server, "/readyz")[::2] == (503, f"{state}\n")
        assert get(server, "/metrics")[0] == 200


def test_not_ready_while_no_model_can_be_had(server: Web, story: Story) -> None:
    taken = snapshots.of(story)
    models = tuple(replace(each, available=False, state="broken") for each in taken.models)
    with Loop(server, replace(taken, models=models)):
        status, _, text = get(server, "/readyz")
    assert status == 503
    assert text == "no model can be had: m is broken, other is broken\n"


def test_a_path_that_is_not_there(server: Web, loop: Loop) -> None:
    status, _, text = get(server, "/metric")
    assert status == 404
    assert "'/metric'" in text and "/metrics, /healthz, /readyz, /stats" in text
    assert loop.left == 0, "the loop was bothered"


def test_a_query_is_no_part_of_the_path(server: Web, loop: Loop) -> None:
    assert get(server, "/healthz?verbose=1")[0] == 200


def test_head_has_no_body(server: Web, loop: Loop) -> None:
    status, kind, text = get(server, "/metrics", "HEAD")
    assert (status, text) == (200, "")
    assert kind.startswith("text/plain")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(server: Web, loop: Loop, method: str) -> None:
    assert get(server, "/metrics", method)[0] == 501
    assert loop.left == 0


def test_many_scrapes_are_little_work_for_the_loop(
    server: Web, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "FRESH", 3600.0)
    for _ in range(20):
        assert get(server, "/metrics")[0] == 200
    assert loop.left == 1


def test_an_old_snapshot_is_not_given_out(
    server: Web, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "FRESH", 0.0)
    for count in (1, 2, 3):
        assert get(server, "/metrics")[0] == 200
        assert loop.left == count


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/stats"])
def test_a_loop_that_is_stuck_is_told(
    server: Web, loop: Loop, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "FRESH", 0.0)
    monkeypatch.setattr(web, "PATIENCE", 0.05)
    loop.turning = False
    status, _, text = get(server, path)
    assert (status, text) == (503, "the broker's loop has not answered for 0.05 s\n")
    monkeypatch.setattr(web, "PATIENCE", 60.0)
    loop.turning = True
    assert get(server, path)[0] == 200


def test_peers_that_say_nothing_leave_room_for_others(server: Web, loop: Loop) -> None:
    host, port = host_port(server.url.removeprefix("http://"))
    with ExitStack() as silent:
        for _ in range(web.AT_ONCE - 1):
            silent.enter_context(socket.create_connection((host, port)))
        assert get(server, "/healthz")[0] == 200


def test_too_many_peers_are_turned_away(server: Web, loop: Loop) -> None:
    host, port = host_port(server.url.removeprefix("http://"))
    with ExitStack() as silent:
        for _ in range(web.AT_ONCE):
            silent.enter_context(socket.create_connection((host, port)))
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(server, "/healthz")


@pytest.mark.parametrize("junk", [b"\r\n\r\n", b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"x" * 70_000])
def test_junk_harms_nobody(server: Web, loop: Loop, junk: bytes) -> None:
    host, port = host_port(server.url.removeprefix("http://"))
    with socket.create_connection((host, port)) as peer:
        peer.sendall(junk)
    assert get(server, "/healthz")[0] == 200


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: .* another port"):
            Web(address)


def test_it_leaves_nothing_behind(story: Story) -> None:
    before = sys.getswitchinterval()
    with Web("127.0.0.1:0") as server:
        url = server.url
        assert sys.getswitchinterval() == pytest.approx(web.SWITCH)
    assert sys.getswitchinterval() == before
    assert "web" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(url, timeout=60)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert host_port(text) == parts


@pytest.mark.parametrize(
    "text", ["9464", ":9464", "127.0.0.1", "127.0.0.1:65536", "::1:9464", "http://a:1", "a b:1"]
)
def test_what_is_no_address(text: str) -> None:
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
