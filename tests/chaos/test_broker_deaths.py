"""The broker is killed with streams in flight: clients resume them at the next broker."""

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
        streams = chaos.start(150, 5)
        for had in (20, 80):
            chaos.reach(streams, had)
            worker = int(chaos.pool.worker("m/0")["pid"])
            chaos.restart_broker()
            until(partial(gone, worker), "its worker is gone")
        findings = chaos.assert_all_done()
        assert findings.ends == {"length": 5}


def test_sigkill_while_requests_wait(tmp_path: Path, monkeypatch: Patch) -> None:
    config = model(step_us=5000, extra="sequences = 1")
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        streams = chaos.start(40, 4)
        until(lambda: any(stream.had > 5 for stream in streams), "one has begun")
        chaos.restart_broker()
        chaos.assert_all_done()


def test_sigterm_and_a_new_broker(tmp_path: Path, monkeypatch: Patch) -> None:
    """A broker that a signal ends leaves its streams to the next broker, as in an upgrade."""
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(150, 3)
        chaos.reach(streams, 20)
        chaos.pool.stop()
        chaos.pool.start()
        chaos.assert_all_done()


def test_a_stopped_pool_ends_its_streams(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(2000, 3)
        chaos.reach(streams, 20)
        chaos.pool.ask("stop")
        chaos.finish()
        assert {stream.error.code for stream in streams if stream.error} == {"draining"}


def test_no_broker_comes_back(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        client = chaos.new_client(broker_grace=2.0)
        (stream,) = chaos.start(2000, client=client)
        chaos.reach([stream], 20)
        chaos.pool.kill()
        chaos.finish()
        client.close()
        assert isinstance(stream.error, BrokerLost)
        chaos.pool.start()


@pytest.mark.parametrize("seconds", [4.0, 12.0])
def test_a_frozen_broker(tmp_path: Path, monkeypatch: Patch, seconds: float) -> None:
    """The broker is frozen for longer than its workers and clients wait; no worker is blamed."""
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(200, 3)
        chaos.reach(streams, 20)
        process = chaos.pool.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        chaos.wait(seconds)
        os.kill(process.pid, signal.SIGCONT)
        chaos.assert_all_done()
        assert chaos.causes() == [], "a worker was blamed for the broker's stop"
