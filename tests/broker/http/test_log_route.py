"""`POST /log` of the broker's HTTP server: the last lines of a worker's log, for operators."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.http.operator_routes import MAX_BYTES, MAX_LINES, LogRoute, last_lines
from mlxpool.broker.http.server import HttpServer
from mlxpool.common.errors import BadRequest
from mlxpool.common.paths import worker_log

TOKEN = "t" * 32
DIGEST = hashlib.sha256(TOKEN.encode()).digest()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    worker_log(tmp_path, "org/m/0").write_text("first\nsecond é\n")
    return tmp_path


@pytest.fixture
def server(run_dir: Path) -> Iterator[HttpServer]:
    with HttpServer("127.0.0.1:0", 3600.0, DIGEST, run_dir) as running:
        yield running


def post(server: HttpServer, body: object, token: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(
        f"{server.url}/log",
        json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {token}",
            "Origin": server.url,
        },
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_an_operator_gets_the_lines_and_nobody_else(server: HttpServer) -> None:
    asked = {"slot": "org/m/0"}
    assert post(server, asked, TOKEN) == (200, {"slot": "org/m/0", "text": "first\nsecond é\n"})
    status, answer = post(server, asked, "u" * 32)
    assert status == 401 and "text" not in answer


def test_a_slot_without_a_log(server: HttpServer, run_dir: Path) -> None:
    status, answer = post(server, {"slot": "m/7"}, TOKEN)
    assert status == 409
    assert answer["error"] == (
        f"there is no log of m/7 in {run_dir / 'logs'} (No such file or directory); a worker of"
        " another machine logs there"
    )


@pytest.mark.parametrize("slot", ["../../secret/0", "..", "/etc/passwd", "../secret/0"])
def test_no_slot_names_a_file_elsewhere(run_dir: Path, slot: str) -> None:
    (run_dir / "secret-0.log").write_text("secret")
    with pytest.raises(BadRequest, match="there is no log"):
        LogRoute(run_dir / "logs", DIGEST).perform(slot)
    with pytest.raises(BadRequest, match="there is no log"):
        LogRoute(run_dir, DIGEST).perform(slot)


@pytest.mark.parametrize("slot", [None, 5, "", "a\0b", "x" * 401])
def test_what_is_no_slot_is_refused(run_dir: Path, slot: object) -> None:
    with pytest.raises(BadRequest, match="the body must be"):
        LogRoute(run_dir, DIGEST).parse({"slot": slot}, "peer")


def test_a_long_log_gives_its_last_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "m-0.log"
    log.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert last_lines(log).splitlines() == [f"line {n}" for n in range(1000 - MAX_LINES, 1000)]
    log.write_bytes((b"x" * 999 + b"\n") * 100)
    assert last_lines(log) == ("x" * 999 + "\n") * (MAX_BYTES // 1000)
    log.write_bytes(b"\xff" + b"y" * 10)
    assert last_lines(log) == "\ufffd" + "y" * 10
