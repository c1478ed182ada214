"""A bad network between clients, broker and workers: resets, half-open links, delay, low rate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import LIMITS, Chaos, model
from mlxpool.client import Client
from mlxpool.common.transport import sockets
from support.free_ports import free_port
from support.pool import PATIENCE, until, with_path
from support.relay import Relay

Patch = pytest.MonkeyPatch

# ---- between client and broker -------------------------------------------------------------------


@contextmanager
def front_relay(tmp_path: Path, monkeypatch: Patch, step_us: int) -> Iterator[tuple[Chaos, Relay]]:
    """Runs a pool to which clients connect over tcp through a relay; yields pool and relay.

    `step_us`: microseconds of a decode step.
    """
    port = free_port()
    limits = f'{LIMITS}front = ["tcp://127.0.0.1:{port}"]\n'
    with (
        Chaos(tmp_path, monkeypatch, model(step_us=step_us), limits) as chaos,
        Relay(("tcp", "127.0.0.1", port)) as relay,
    ):
        yield chaos, relay


def test_resets_at_the_front(tmp_path: Path, monkeypatch: Patch) -> None:
    with front_relay(tmp_path, monkeypatch, 5000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        streams = chaos.start(200, 4, client=client)
        for had in (20, 60, 120):
            chaos.reach(streams, had)
            relay.cut()
        chaos.assert_all_done()
        client.close()


def test_a_half_open_link_at_the_front(tmp_path: Path, monkeypatch: Patch) -> None:
    """Only missing heartbeats show the client that its connection is half-open."""
    with front_relay(tmp_path, monkeypatch, 5000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        streams = chaos.start(200, 3, client=client)
        chaos.reach(streams, 20)
        relay.freeze()
        chaos.wait(4)
        relay.thaw()
        chaos.assert_all_done()
        client.close()


def test_delay_and_drip_at_the_front(tmp_path: Path, monkeypatch: Patch) -> None:
    with front_relay(tmp_path, monkeypatch, 2000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        relay.delay(0.2)
        streams = chaos.start(100, 3, client=client)
        chaos.finish(streams)
        relay.delay(0)
        relay.drip(6000)
        chaos.start(60, 2, client=client)
        chaos.assert_all_done()
        client.close()


# ---- between worker and broker -------------------------------------------------------------------


@contextmanager
def back_relay(tmp_path: Path, monkeypatch: Patch, step_us: int) -> Iterator[tuple[Chaos, Relay]]:
    """Runs a pool whose workers connect to the broker through a relay; yields pool and relay.

    `step_us`: microseconds of a decode step.
    """
    chaos = Chaos(tmp_path, monkeypatch, model(step_us=step_us))
    back = sockets.ipc(chaos.pool.run_dir, "back").removeprefix("ipc://")
    with Relay(("ipc", back)) as relay:
        (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(endpoint=relay.endpoint))
        chaos.pool.environment["PYTHONPATH"] = with_path(tmp_path)
        with chaos:
            yield chaos, relay


# Replaces the broker's endpoint in the worker's environment with the relay's.
SITECUSTOMIZE = """\
import json, os

if "MLXPOOL_WORKER" in os.environ:
    told = json.loads(os.environ["MLXPOOL_WORKER"])
    told["endpoint"] = {endpoint!r}
    os.environ["MLXPOOL_WORKER"] = json.dumps(told)
"""


def test_resets_at_the_back(tmp_path: Path, monkeypatch: Patch) -> None:
    """The same worker sends `hello` again, and continues its streams."""
    with back_relay(tmp_path, monkeypatch, 5000) as (chaos, relay):
        streams = chaos.start(200, 4)
        chaos.reach(streams, 20)
        pid = chaos.pool.worker("m/0")["pid"]
        for had in (30, 90):
            chaos.reach(streams, had)
            relay.cut()
        chaos.assert_all_done()
        worker = until(lambda: _connected_again(chaos), "it has said hello three times")
        assert worker["pid"] == pid


def _connected_again(chaos: Chaos) -> dict[str, Any]:
    """Returns the row of the worker in `ps`, once the worker has sent `hello` three times.

    The first `hello` belongs to its start, the others to new connections. Returns {} before that.
    """
    worker = chaos.pool.worker("m/0")
    return worker if worker["epoch"] >= 3 else {}


def test_a_half_open_link_at_the_back(tmp_path: Path, monkeypatch: Patch) -> None:
    with back_relay(tmp_path, monkeypatch, 5000) as (chaos, relay):
        streams = chaos.start(150, 3)
        chaos.reach(streams, 20)
        relay.freeze()
        until(lambda: chaos.pool.worker("m/0").get("suspect"), "the worker is suspected")
        relay.thaw()
        chaos.assert_all_done()


def test_a_link_at_the_back_that_never_recovers(tmp_path: Path, monkeypatch: Patch) -> None:
    """The worker is ended, and its requests are not blamed; the next worker connects anew."""
    with back_relay(tmp_path, monkeypatch, 5000) as (chaos, relay):
        streams = chaos.start(150, 3)
        chaos.reach(streams, 20)
        pid = int(chaos.pool.worker("m/0")["pid"])
        relay.freeze()
        until(lambda: not os.path.exists(f"/proc/{pid}"), "the worker is ended")
        relay.cut()
        relay.thaw()
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith("no beat for")


def test_delay_and_drip_at_the_back(tmp_path: Path, monkeypatch: Patch) -> None:
    with back_relay(tmp_path, monkeypatch, 2000) as (chaos, relay):
        relay.delay(0.2)
        streams = chaos.start(60, 3)
        chaos.finish(streams)
        relay.delay(0)
        relay.drip(20_000)
        chaos.start(60, 2)
        chaos.assert_all_done()
        assert chaos.causes() == []
