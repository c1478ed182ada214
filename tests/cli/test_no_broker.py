"""Commands that send requests, without a broker that answers."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlxpool.client
from mlxpool.cli import request_flags
from mlxpool.cli.admin import alive, check_socket
from mlxpool.cli.commands import pool as pool_commands
from mlxpool.cli.main import UNREACHABLE, USAGE, main
from mlxpool.client.connection import Connection
from mlxpool.client.retry import Pace
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, until

REQUESTS = [
    ["run", "m", "x"],
    ["chat", "m"],
    ["embed", "m", "x"],
    ["rerank", "m", "q", "x"],
    ["classify", "m", "x"],
    ["decide", "m", "x"],
]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLXPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))


@pytest.fixture
def empty() -> Iterator[Path]:
    """A run directory without a broker; its path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        yield Path(folder)


def no_client(*_: Any, **__: Any) -> Any:
    raise AssertionError("a client was made, which waits")


@pytest.mark.parametrize("arguments", REQUESTS, ids=lambda words: words[0])
def test_without_a_socket_nothing_is_waited_for(
    arguments: list[str],
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mlxpool.client, "Client", no_client)
    assert main([*arguments, "--run-dir", str(empty)]) == UNREACHABLE
    said = capsys.readouterr().err
    assert f"there is no socket {empty}/front.ipc" in said and "mlxpool serve" in said
    endpoint = f"ipc://{empty}/other.ipc"
    assert main([*arguments, "--endpoint", endpoint, "--json"]) == UNREACHABLE
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "broker_lost"


@pytest.mark.parametrize("arguments", [*REQUESTS, ["ps"]], ids=lambda words: words[0])
def test_a_run_directory_in_which_no_broker_starts_is_named(
    arguments: list[str], empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names the folder's wrong mode, which a background broker would only log."""
    empty.chmod(0o777)
    assert main([*arguments, "--run-dir", str(empty)]) == UNREACHABLE
    said = capsys.readouterr().err
    assert "has the mode 0777, with which other users may put files there; it must be 0700" in said
    assert f"chmod 700 {empty}" in said and "start one" not in said


def test_without_a_socket_standard_input_is_not_read(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", object())  # fails if it is read
    assert main(["run", "m", "--run-dir", str(empty)]) == UNREACHABLE


def test_a_broker_that_is_starting_is_named(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "lock").write_text(f"{os.getpid()}\n")
    assert main(["run", "m", "x", "--run-dir", str(empty)]) == UNREACHABLE
    assert f"the broker (pid {os.getpid()}) of {empty} is starting" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", REQUESTS, ids=lambda words: words[0])
def test_a_socket_that_a_killed_broker_left_is_not_waited_for(
    arguments: list[str],
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mlxpool.client, "Client", no_client)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (empty / "lock").write_text(f"{ended.pid}\n")
    for name in ("front", "admin"):
        (empty / f"{name}.ipc").touch()
    assert main([*arguments, "--run-dir", str(empty)]) == UNREACHABLE
    assert f"(pid {ended.pid}) has ended without removing {empty}/" in capsys.readouterr().err


def test_a_broker_of_another_container_is_no_killed_one(empty: Path) -> None:
    """A broker that listens is not reported as killed, even if this container lacks its pid."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (empty / "lock").write_text(f"{ended.pid}\n")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(empty / "front.ipc"))
        bound.listen()
        check_socket(empty, f"ipc://{empty}/front.ipc")


@pytest.mark.parametrize("known", [True, False], ids=["frozen", "unknown"])
def test_a_broker_that_takes_no_connection_is_given_up_within_a_second(
    known: bool, empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that accepts no connection is given up within 1 s.

    The limit of 5 s is only for a broker that has accepted the connection.
    """
    assert request_flags.IPC_GRACE < request_flags.TCP_GRACE
    start = 0.2  # seconds of the 1 s for Python and its imports, on an idle machine
    assert start + request_flags.TCP_GRACE + request_flags.TICK <= 1
    given: list[float] = []

    def note(connection: Connection) -> None:
        given.append(connection.timer.silent)
        give_up(connection)

    give_up = Connection._give_up
    monkeypatch.setattr(Connection, "_give_up", note)
    if known:
        (empty / "lock").write_text(f"{os.getpid()}\n")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(empty / "front.ipc"))
        bound.listen()
        assert main(["run", "m", "x", "--run-dir", str(empty)]) == UNREACHABLE
    assert given[0] <= request_flags.IPC_GRACE + request_flags.TICK + Pace().gap  # not 5 s
    frozen = f"the broker (pid {os.getpid()}) of {empty} does not answer: it is frozen"
    nobody = f"no broker answers at ipc://{empty}/front.ipc for 1 s; start one with"
    assert (frozen if known else nobody) in capsys.readouterr().err


def test_connect_timeout_waits_for_a_broker(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    try:
        command = [*pool.command(), "run", "counting", "hello", "--seed", "7", "--max-tokens", "3"]
        waiting = subprocess.Popen(
            [*command, "--connect-timeout", f"{PATIENCE:g}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**pool.environment, "MLXPOOL_HISTORY": str(tmp_path)},
        )
        try:  # the command's history has the request before a broker runs
            until(
                lambda: any('"sent"' in f.read_text() for f in tmp_path.glob("client-*")),
                "the command has sent its request",
            )
            pool.start()
            printed, said = waiting.communicate(timeout=PATIENCE)
        finally:
            waiting.kill()
            waiting.communicate()
        assert printed.decode() == text_of(expected_ids("hello", 7, 3)) + "\n", said
    finally:
        pool.close()


@pytest.mark.parametrize(("given", "waited"), [((), 2.0), (("--connect-timeout", "30"), 30.0)])
def test_load_waits_as_long_for_a_broker(
    given: tuple[str, ...], waited: float, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float] = []

    def ask(*_: object, timeout: float) -> dict[str, str]:
        timeouts.append(timeout)
        return {"model": "m"}

    monkeypatch.setattr(pool_commands, "ask", ask)
    assert main(["load", "m", "--run-dir", str(empty), *given]) == 0
    assert timeouts == [waited]


def test_connect_timeout_ends(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "m", "x", "--run-dir", str(empty), "--connect-timeout", "0.1"]
    assert main(arguments) == UNREACHABLE
    assert "no broker answers at ipc://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--temperature", "-3"], "--temperature"),
        (["--top-p", "1.5"], "--top-p"),
        (["--seed", "-2"], "--seed"),
        (["--top-logprobs", "21"], "--top-logprobs"),
    ],
)
@pytest.mark.parametrize("command", [["run", "m", "x"], ["chat", "m"]], ids=["run", "chat"])
def test_options_are_checked_before_a_broker_is_asked(
    command: list[str], flags: list[str], told: str, empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *flags, "--run-dir", str(empty)]) == USAGE
    said = capsys.readouterr().err
    assert told in said and "must be from" in said


@pytest.mark.parametrize("command", [["run", "m", "x"], ["ps"], ["top"], ["chat", "m"]])
def test_a_malformed_endpoint(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--endpoint", "foo"]) == USAGE
    assert "must be tcp://HOST:PORT or ipc://PATH, got 'foo'" in capsys.readouterr().err


def test_a_process_that_has_ended_runs_no_longer_though_nobody_has_waited_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert alive(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert alive(process.pid) is (not Path("/proc").is_dir())
