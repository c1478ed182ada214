"""The broker dies with streams in flight; clients send again, and the next one goes on."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from chaos.harness import Chaos, model
from mlxpool.common.errors import BrokerLost
from support.pool import until

Patch = pytest.MonkeyPatch


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_sigkill_with_streams_in_flight(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(150, 5)
        for had in (20, 80):
            chaos.reach(asks, had)
            worker = int(chaos.pool.worker("m/0")["pid"])
            chaos.restart_broker()
            until(partial(gone, worker), "its worker is gone")
        findings = chaos.assert_all_done()
        assert findings.ends == {"length": 5}


def test_sigkill_while_requests_wait(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(step_us=5000, extra="sequences = 1")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        asks = chaos.start(40, 4)
        until(lambda: any(ask.had > 5 for ask in asks), "one has begun")
        chaos.restart_broker()
        chaos.assert_all_done()


def test_sigterm_and_a_new_broker(tmp_path: Path, monkeypatch: Patch) -> None:
    """As an upgrade does it: who sends signals may start the next one."""
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(150, 3)
        chaos.reach(asks, 20)
        chaos.pool.stop()
        chaos.pool.start()
        chaos.assert_all_done()


def test_a_stopped_pool_ends_its_streams(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(2000, 3)
        chaos.reach(asks, 20)
        chaos.pool.ask("stop")
        chaos.finish()
        assert {ask.error.code for ask in asks if ask.error} == {"draining"}


def test_no_broker_comes_back(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        client = chaos.new_client(broker_grace=2.0)
        (ask,) = chaos.start(2000, client=client)
        chaos.reach([ask], 20)
        chaos.pool.kill()
        chaos.finish()
        client.close()
        assert isinstance(ask.error, BrokerLost)
        chaos.pool.start()


@pytest.mark.parametrize("seconds", [4.0, 12.0])
def test_a_frozen_broker(tmp_path: Path, monkeypatch: Patch, seconds: float) -> None:
    """Past the heartbeat of the sockets, and past the grace of its clients: its own fault."""
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(200, 3)
        chaos.reach(asks, 20)
        process = chaos.pool.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        chaos.wait(seconds)
        os.kill(process.pid, signal.SIGCONT)
        chaos.assert_all_done()
        assert chaos.causes() == [], "it blamed a worker for its own sleep"
