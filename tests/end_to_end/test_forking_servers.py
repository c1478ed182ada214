"""Clients in programs that fork: gunicorn with --preload, and celery's prefork pool.

Each program makes a client when it is imported, before the fork, and another after the fork. In
every forked process the first client raises at once, and the second works.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, until

TEXT = text_of(expected_ids("hello", 7, 3))
FAULT = "make a client in each process, after the fork"

GUNICORN_APP = """
import functools

from mlxpool.client import Client, PoolError

made_at_import = Client(connect_timeout=200)
made_at_import.models()


@functools.cache
def client():
    return Client(connect_timeout=200)


def app(environ, start_response):
    used = client() if environ["PATH_INFO"] == "/own" else made_at_import
    try:
        status, text = "200 OK", used.generate("counting", "hello", seed=7, max_tokens=3).text
    except PoolError as error:
        status, text = "500 Internal Server Error", str(error)
    start_response(status, [("Content-Type", "text/plain")])
    return [text.encode()]
"""

CELERY_APP = """
import os

from celery import Celery
from celery.signals import worker_process_init

from mlxpool.client import Client

folder = os.environ["TASKS_FOLDER"]
app = Celery("tasks", broker="filesystem://", backend=f"file://{folder}/results")
app.conf.broker_transport_options = {
    "data_folder_in": f"{folder}/queue",
    "data_folder_out": f"{folder}/queue",
    "control_folder": f"{folder}/control",
}
made_at_import = Client(connect_timeout=200)
own = None


@worker_process_init.connect
def connect(**_):
    global own
    own = Client(connect_timeout=200)


@app.task
def generate(client):
    used = own if client == "own" else made_at_import
    return used.generate("counting", "hello", seed=7, max_tokens=3).text


made_at_import.models()
"""
CELERY_SENDER = """
import json
from tasks import generate, made_at_import

waiting = [generate.delay("own"), generate.delay("made_at_import")]
print(json.dumps([str(one.get(timeout=200, propagate=False)) for one in waiting]))
made_at_import.close()
"""


@contextlib.contextmanager
def running(
    command: list[str], folder: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server in its own process group; ends it by SIGTERM, then kills the whole group."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
        process.terminate()
        process.wait(PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def get(address: Path, path: str) -> tuple[int, str]:
    """Returns status and body of a request over a Unix socket."""
    connection = http.client.HTTPConnection("localhost", timeout=PATIENCE)
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.settimeout(PATIENCE)
    with contextlib.closing(connection):
        connection.sock.connect(str(address))
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_gunicorn_with_preload(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    (tmp_path / "service.py").write_text(GUNICORN_APP)
    address = pool.run_dir / "http"
    environment = {**pool.environment, "MLXPOOL_RUN_DIR": str(pool.run_dir), "HOME": str(tmp_path)}
    command = [
        "gunicorn",
        "--preload",
        "--workers",
        "2",
        "--bind",
        f"unix:{address}",
        "service:app",
    ]
    with running(command, tmp_path, environment) as server:
        until(
            lambda: server.poll() is not None or "Booting worker" in (tmp_path / "log").read_text(),
            "gunicorn starts",
        )
        assert server.poll() is None, (tmp_path / "log").read_text()
        for _ in range(4):  # enough requests for both workers
            assert get(address, "/own") == (200, TEXT)
            status, said = get(address, "/import")
            assert status == 500 and FAULT in said and str(server.pid) in said
    assert server.returncode == 0, (tmp_path / "log").read_text()


def test_celery_with_its_prefork_pool(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("celery", reason="celery is not installed")
    (tmp_path / "tasks.py").write_text(CELERY_APP)
    (tmp_path / "sender.py").write_text(CELERY_SENDER)
    for name in ("queue", "control", "results"):
        (tmp_path / name).mkdir()
    environment = {
        **pool.environment,
        "MLXPOOL_RUN_DIR": str(pool.run_dir),
        "TASKS_FOLDER": str(tmp_path),
        "C_FORCE_ROOT": "1",
    }
    command = ["celery", "-A", "tasks", "worker", "--pool", "prefork", "--concurrency", "1"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    with running(command, tmp_path, environment) as server:
        sent = subprocess.run(
            [sys.executable, "sender.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert sent.returncode == 0, sent.stderr + (tmp_path / "log").read_text()
        own, imported = json.loads(sent.stdout)
        assert own == TEXT
        assert FAULT in imported and str(server.pid) in imported
    assert server.returncode == 0, (tmp_path / "log").read_text()
