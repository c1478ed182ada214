"""Who watches is told each second, at no cost to anybody when nobody does."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from mlxpool.broker.admin.commands import Admin
from mlxpool.broker.admin.subscriptions import LEASE, MOST, PERIOD, Watcher, Watchers
from mlxpool.broker.edge.loop import Broker
from mlxpool.broker.edge.peers import Peers
from mlxpool.broker.metrics.counters import Counters
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from support.pool import Pool
from support.raw_peer import RawPeer

ID = bytes(16)


class Line(Peers):
    """Connections that keep what they are sent; `dead` ones are gone, `full` ones read nothing."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, frames.Message]] = []
        self.dead: set[int] = set()
        self.full = set()
        self.forgotten: list[int] = []

    def send(self, number: int, parts: list[bytes]) -> bool:
        if number in self.dead:
            return False
        self.sent.append((number, frames.decode(parts, max_body=frames.MAX_BLOB)))
        return True

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def watchers(line: Line) -> Watchers:
    return Watchers(line, lambda now: {"at": now})


def told(line: Line) -> list[tuple[int, Any]]:
    sent, line.sent = line.sent, []
    return [(number, message.body["at"]) for number, message in sent]


def test_nothing_is_due_while_nobody_watches(watchers: Watchers, line: Line) -> None:
    assert watchers.next_wake() == math.inf
    watchers.serve(1e9)
    assert told(line) == []


def test_at_once_and_then_each_second(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    assert told(line) == [(1, 10.0)]
    assert watchers.next_wake() == 10.0 + PERIOD
    watchers.serve(10.5)
    assert told(line) == []
    watchers.serve(11.0)
    watchers.serve(11.1)
    assert told(line) == [(1, 11.0)]


def test_all_are_told_of_the_same_moment(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    watchers.admit(2, ID, 10.5)
    assert told(line) == [(1, 10.0), (2, 10.5)]
    watchers.serve(11.0)
    assert told(line) == [(1, 11.0), (2, 11.0)]


def test_asking_again_prolongs_and_brings_no_second_picture(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    watchers.admit(1, b"x" * 16, 12.0)
    told(line)
    watchers.serve(10.0 + LEASE)
    assert line.sent[0][1].header == Header(kinds.WATCH, b"x" * 16)
    watchers.serve(12.0 + LEASE)
    assert line.forgotten == [1]
    assert len(watchers) == 0 and watchers.next_wake() == math.inf


def test_who_does_not_ask_again_is_forgotten(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    told(line)
    watchers.serve(10.0 + LEASE)
    assert (told(line), line.forgotten) == ([], [1])


def test_who_does_not_read_gets_no_more(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    watchers.admit(2, ID, 10.0)
    told(line)
    line.full.add(1)
    watchers.serve(11.0)
    assert told(line) == [(2, 11.0)]


def test_who_is_gone_is_forgotten(watchers: Watchers, line: Line) -> None:
    watchers.admit(1, ID, 10.0)
    line.dead.add(1)
    watchers.serve(11.0)
    assert 1 not in watchers
    watchers.serve(12.0)
    assert watchers.next_wake() == math.inf


def test_there_is_an_end_of_watchers(watchers: Watchers) -> None:
    for number in range(MOST):
        assert watchers.takes(number)
        watchers.admit(number, ID, 10.0)
    assert not watchers.takes(MOST)
    assert watchers.takes(0)


# ---- on the admin socket -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def test_pictures_on_the_admin_socket(pool: Pool) -> None:
    with pool.client() as client:
        client.generate("counting", "x", max_tokens=3)
    with RawPeer(pool.run_dir, "admin") as peer:
        peer.say(Header(kinds.WATCH, ID))
        first, second = peer.receive(), peer.receive()
        assert first.header == second.header == Header(kinds.WATCH, ID)
        assert first.body["seq"] < second.body["seq"]
        model = next(m for m in first.body["models"] if m["name"] == "counting")
        assert (model["accepted"], model["tokens"]) == (1, 3)
        assert sum(model["first_token"]["counts"]) == 1
        assert first.body["workers"][0]["tokens"] == 3
        peer.say(Header("stats", ID))
        peer.receive_kind("stats")  # other questions are answered on the same connection
        peer.say(Header(kinds.WATCH, ID))
        assert peer.receive_kind(kinds.WATCH).body["seq"] > second.body["seq"]


def test_one_too_many_is_refused() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with (
        tempfile.TemporaryDirectory(prefix="mlxpool-") as folder,
        RawPeer(Path(folder), "a") as peer,
    ):
        socket = sockets.router(context, sockets.ipc(Path(folder), "a"))
        admin = Admin(cast(Broker, None), Peers(socket))
        try:
            admin.watchers._of.update((n, Watcher(ID, math.inf)) for n in range(100, 100 + MOST))
            peer.say(Header(kinds.WATCH, ID))
            assert admin.socket.poll(60_000)
            admin.serve(1.0)
            refused = peer.receive()
        finally:
            admin.socket.close(linger=0)
            context.term()
    assert refused.body["code"] == "queue_full" and refused.body["retry_after_ms"] == 5000


def test_a_picture_that_fails_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = SimpleNamespace(core=SimpleNamespace(state=SimpleNamespace(counters=Counters())))
    admin = Admin(cast(Broker, broken), Peers(cast("zmq.Socket[bytes]", None)))
    admin._guarded(partial(admin.watchers.admit, 1, ID), 1.0)  # this broker has no figures
    assert broken.core.state.counters.internal_errors == 1
    assert "a picture failed" in caplog.text
