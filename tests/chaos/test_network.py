"""A bad network in front and behind: resets, half-open links, delay, a slow drip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.harness import LIMITS, Chaos, model
from chaos.storm import free_port
from mlxpool.client import Client
from mlxpool.common.transport import sockets
from support.pool import PATIENCE, until, with_path
from support.relay import Relay

Patch = pytest.MonkeyPatch

# ---- between client and broker -------------------------------------------------------------------


@contextmanager
def in_front(tmp_path: Path, monkeypatch: Patch, step_us: int) -> Iterator[tuple[Chaos, Relay]]:
    """A pool whose clients come over tcp through a relay."""
    port = free_port()
    limits = f'{LIMITS}front = ["tcp://127.0.0.1:{port}"]\n'
    with (
        Chaos(tmp_path, monkeypatch, model(step_us=step_us), limits) as chaos,
        Relay(("tcp", "127.0.0.1", port)) as relay,
    ):
        yield chaos, relay


def test_resets_in_front(tmp_path: Path, monkeypatch: Patch) -> None:
    with in_front(tmp_path, monkeypatch, 5000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        asks = chaos.start(200, 4, client=client)
        for had in (20, 60, 120):
            chaos.reach(asks, had)
            relay.cut()
        chaos.assert_all_done()
        client.close()


def test_a_half_open_link_in_front(tmp_path: Path, monkeypatch: Patch) -> None:
    """Nothing comes and nothing is refused: only the silence tells."""
    with in_front(tmp_path, monkeypatch, 5000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        asks = chaos.start(200, 3, client=client)
        chaos.reach(asks, 20)
        relay.freeze()
        chaos.wait(4)
        relay.thaw()
        chaos.assert_all_done()
        client.close()


def test_delay_and_drip_in_front(tmp_path: Path, monkeypatch: Patch) -> None:
    with in_front(tmp_path, monkeypatch, 2000) as (chaos, relay):
        client = Client(endpoint=relay.endpoint, connect_timeout=PATIENCE)
        relay.delay(0.2)
        asks = chaos.start(100, 3, client=client)
        chaos.finish(asks)
        relay.delay(0)
        relay.drip(6000)
        chaos.start(60, 2, client=client)
        chaos.assert_all_done()
        client.close()


# ---- between worker and broker -------------------------------------------------------------------


@contextmanager
def behind(tmp_path: Path, monkeypatch: Patch, step_us: int) -> Iterator[tuple[Chaos, Relay]]:
    """A pool whose workers reach their broker through a relay."""
    chaos = Chaos(tmp_path, monkeypatch, model(step_us=step_us))
    back = sockets.ipc(chaos.pool.run_dir, "back").removeprefix("ipc://")
    with Relay(("ipc", back)) as relay:
        (tmp_path / "sitecustomize.py").write_text(DETOUR.format(endpoint=relay.endpoint))
        chaos.pool.environment["PYTHONPATH"] = with_path(tmp_path)
        with chaos:
            yield chaos, relay


# The worker is told where its broker is through its environment: this tells it the relay instead.
DETOUR = """\
import json, os

if "MLXPOOL_WORKER" in os.environ:
    told = json.loads(os.environ["MLXPOOL_WORKER"])
    told["endpoint"] = {endpoint!r}
    os.environ["MLXPOOL_WORKER"] = json.dumps(told)
"""


def test_resets_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    """The same process says `hello` again; its streams are resumed in it."""
    with behind(tmp_path, monkeypatch, 5000) as (chaos, relay):
        asks = chaos.start(200, 4)
        chaos.reach(asks, 20)
        pid = chaos.pool.worker("m/0")["pid"]
        for had in (30, 90):
            chaos.reach(asks, had)
            relay.cut()
        chaos.assert_all_done()
        assert chaos.pool.worker("m/0")["pid"] == pid
        assert chaos.pool.worker("m/0")["epoch"] >= 3


def test_a_half_open_link_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    with behind(tmp_path, monkeypatch, 5000) as (chaos, relay):
        asks = chaos.start(150, 3)
        chaos.reach(asks, 20)
        relay.freeze()
        until(lambda: chaos.pool.worker("m/0").get("suspect"), "its silence is noticed")
        relay.thaw()
        chaos.assert_all_done()


def test_a_link_behind_that_never_comes_back(tmp_path: Path, monkeypatch: Patch) -> None:
    """The worker is ended, through no fault of what it ran; the next one dials anew."""
    with behind(tmp_path, monkeypatch, 5000) as (chaos, relay):
        asks = chaos.start(150, 3)
        chaos.reach(asks, 20)
        pid = int(chaos.pool.worker("m/0")["pid"])
        relay.freeze()
        until(lambda: not os.path.exists(f"/proc/{pid}"), "it is ended")
        relay.cut()
        relay.thaw()
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith("no beat for")


def test_delay_and_drip_behind(tmp_path: Path, monkeypatch: Patch) -> None:
    with behind(tmp_path, monkeypatch, 2000) as (chaos, relay):
        relay.delay(0.2)
        asks = chaos.start(60, 3)
        chaos.finish(asks)
        relay.delay(0)
        relay.drip(20_000)
        chaos.start(60, 2)
        chaos.assert_all_done()
        assert chaos.causes() == []
