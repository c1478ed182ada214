"""The admin socket: answers, subscribers, and commands that raise an unexpected exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mlxpool.broker.admin.commands import Commands, Controls
from mlxpool.broker.admin.server import AdminServer
from mlxpool.broker.admin.subscriptions import MAX_SUBSCRIBERS
from mlxpool.broker.core import events as ev
from mlxpool.broker.edge.job_service import refuse_questions
from mlxpool.broker.transport.peers import Peer
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.frames import Header, Message
from support import kinds, snapshots
from support.core_harness import Story
from support.fake_peers import FakePeers
from support.pool import Pool
from support.raw_peer import RawPeer

ID = bytes(16)


class Admin:
    """An admin server for the core of a simulation."""

    def __init__(self, story: Story) -> None:
        self.story, self.peers = story, FakePeers()
        self.grace: float | Exception = 30.0
        self.outcome: Mapping[str, Any] | PoolError = {"state": "reloaded"}
        self.waiting: list[Callable[[float], None]] = []  # callbacks for a reload
        self.stopped_at: list[float] = []
        self.events: list[ev.Event] = []
        self.figures: Mapping[str, Any] | Exception = {}
        controls = Controls(
            snapshot=lambda now, listing: snapshots.of(story),
            last_dump=lambda slot: None,
            reloaded=self._reloaded,
            stop=self.stopped_at.append,
            drain_grace=self._grace,
        )
        commands = Commands(story.core, controls, lambda event, now: self.events.append(event))
        self.server = AdminServer(
            self.peers,
            commands,
            self._figures,
            lambda answer, now: answer(now),
            lambda answer, now: self.waiting.append(answer),
            refuse_questions("none are kept"),
            story.core.state.counters,
        )

    def _reloaded(self) -> Mapping[str, Any]:
        if isinstance(self.outcome, PoolError):
            raise self.outcome
        return self.outcome

    def _grace(self) -> float:
        if isinstance(self.grace, Exception):
            raise self.grace
        return self.grace

    def _figures(self, now: float) -> Mapping[str, Any]:
        if isinstance(self.figures, Exception):
            raise self.figures
        return self.figures

    def send(self, parts: list[bytes], number: int = 1, *, admitted: bool = True) -> None:
        peer = Peer(b"name", number, 0.0, "uid:1", admitted=admitted)
        self.peers.incoming.append((peer, parts))
        self.server.serve(1.0)

    def ask(self, kind: str, number: int = 1, id: bytes | None = ID, **body: Any) -> Message:
        """Returns the only answer to a command."""
        self.send(frames.encode(Header(kind, id), body), number)
        ((to, answer),) = self.peers.sent
        self.peers.sent.clear()
        assert to == number
        return answer

    def refused(self, kind: str, **body: Any) -> str:
        """Returns the message of the error in the answer to a command."""
        answer = self.ask(kind, **body)
        assert answer.kind == kinds.ERROR and not self.events
        return str(answer.body["message"])


@pytest.fixture
def admin(story: Story) -> Admin:
    return Admin(story)


def test_an_answer_has_the_kind_and_the_id_of_its_command(admin: Admin) -> None:
    answer = admin.ask("stats")
    assert (answer.kind, answer.header.id) == ("stats", ID)
    assert answer.body["requests"]["live"] == 0
    assert admin.peers.forgotten == [1], "the connection takes no memory any more"


def test_a_frame_that_cannot_be_decoded_gets_an_error(admin: Admin) -> None:
    admin.send([b"\x00"])
    ((_, answer),) = admin.peers.sent
    assert (answer.kind, answer.body["code"]) == (kinds.ERROR, "bad_request")


def test_a_peer_whose_key_is_not_allowed_gets_no_answer(admin: Admin) -> None:
    admin.send(frames.encode(Header("stop", ID), {}), admitted=False)
    assert not admin.peers.sent and not admin.stopped_at
    assert admin.story.core.state.counters.auth_failures == 1


def test_commands_become_events(admin: Admin) -> None:
    for kind, body, event in (
        ("load", {"model": "m"}, ev.LoadModel("m")),
        ("unload", {"model": "m"}, ev.UnloadModel("m")),
        ("drain", {}, ev.StartDrain(None, None, 30.0)),
        ("drain", {"model": "m", "timeout_ms": 0}, ev.StartDrain(None, "m", 0.0)),
        ("restart", {"slot": "m/0"}, ev.RestartWorker("m/0")),
        ("cancel", {}, ev.CancelRequest(None, None, ID)),
    ):
        assert admin.ask(kind, **body).kind == kind
        assert admin.events == [event]
        admin.events.clear()
    assert admin.ask("stop").body == {"state": "stopping"}
    assert admin.stopped_at == [1.0]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("fly", {}, "unknown admin command 'fly'; known: ps, stats, watch, models, requests,"),
        ("load", {"model": 5}, "load: model must be a name"),
        ("load", {"model": "n"}, "there is no model 'n'"),
        ("drain", {"slot": "m/0", "model": "m"}, "drain: give slot or model, not both"),
        ("drain", {"slot": 5}, "drain: there is no slot 5; known: m/0"),
        ("drain", {"slot": "m/0"}, "m/0 has no worker to drain"),
        ("drain", {"timeout_ms": -1}, "drain: timeout_ms must be from 0 to 86400000, got -1"),
        ("drain", {"timeout_ms": True}, "timeout_ms must be from 0 to 86400000, got True"),
        ("restart", {}, "restart: there is no slot None; known: m/0"),
    ],
)
def test_bad_commands_are_refused_with_the_reason(
    admin: Admin, kind: str, body: dict[str, Any], words: str
) -> None:
    assert words in admin.refused(kind, **body)


def test_reload_is_answered_when_it_is_over(admin: Admin) -> None:
    for number in (1, 2):
        admin.send(frames.encode(Header("reload", ID), {}), number)
    assert admin.peers.sent == [], "the settings are being read"
    done, failed = admin.waiting
    done(2.0)
    admin.outcome = BadRequest("not reloaded: keys, line 3")
    failed(3.0)
    (first, answer), (second, error) = admin.peers.sent
    assert (first, answer.kind, answer.body) == (1, "reload", {"state": "reloaded"})
    assert (second, error.kind, error.body["code"]) == (2, kinds.ERROR, "bad_request")
    assert "line 3" in error.body["message"]


def test_a_bug_in_a_command_costs_one_answer(admin: Admin) -> None:
    admin.grace = ZeroDivisionError("a bug")
    assert admin.refused("drain").startswith("the admin command failed: ZeroDivisionError")
    assert admin.story.core.state.counters.internal_errors == 1


# ---- subscriptions -------------------------------------------------------------------------------


def test_a_watch_above_the_bound_of_subscribers_is_refused(admin: Admin) -> None:
    for number in range(100, 100 + MAX_SUBSCRIBERS):
        assert admin.ask(kinds.WATCH, number).kind == kinds.WATCH
    refused = admin.ask(kinds.WATCH)
    assert refused.body["code"] == "queue_full" and refused.body["retry_after_ms"] == 5000


def test_figures_that_raise_cost_one_update(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    admin.figures = ValueError("no figures")
    admin.send(frames.encode(Header(kinds.WATCH, ID), {}))
    assert admin.story.core.state.counters.internal_errors == 1
    assert "a picture failed" in caplog.text


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as running:
        yield running


def test_updates_of_a_running_pool(pool: Pool) -> None:
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
        peer.receive_kind("stats")  # other commands are answered on the same connection
        peer.say(Header(kinds.WATCH, ID))
        assert peer.receive_kind(kinds.WATCH).body["seq"] > second.body["seq"]
