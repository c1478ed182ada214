"""A real worker process: its link to the broker, drain, and the history that it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.errors import TooLarge
from mlxpool.common.protocol import deltas, frames
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import MAX_BACK_BODY
from mlxpool.common.protocol.from_worker import Hello
from mlxpool.common.protocol.to_worker import Welcome
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.common.trace import History
from mlxpool.worker.__main__ import build
from mlxpool.worker.compute.messages import Loaded
from mlxpool.worker.process.edge import REST_TIME
from mlxpool.worker.process.intake import Task
from mlxpool.worker.process.link import MAX_COUNTED_TURN, SILENCE_LIMIT, Link, Silence
from support import kinds
from support.counting_checker import expected_ids, text_of
from support.pool import until
from support.worker_process import TOKEN, WorkerProcess, id_of


def ids_of(found: list[Delta]) -> list[int]:
    return [token for delta in found for token in unpack_ids(delta.ids)]


def test_hello_welcome_credit_work_and_their_history(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path) as worker:
        hello = worker.welcome(7)
        assert hello.body["token"] == TOKEN and hello.body["digest"] == "counting-50000"
        worker.work(1, max_tokens=3)
        received = worker.deltas_until(1)[1]
        assert ids_of(received) == expected_ids("xyz", 1, 3)
        credit = worker.receive(kinds.CREDIT)
        assert credit.body == {"sequences": 8, "works": 1}
        lines = [
            {k: v for k, v in line.items() if k not in ("t", "pid")} for line in worker.history()
        ]
    run = {"id": id_of(1).hex(), "attempt": 1}
    assert lines == [
        {"who": "worker-counting/0", **line}
        for line in (
            {"what": "hello"},
            {"what": "welcome", "epoch": 7},
            {"what": "work", **run, "count": 0},
            {"what": "deltas", **run, "pos": 0, "n": 1, "end": None},
            {"what": "deltas", **run, "pos": 1, "n": 1, "end": None},
            {"what": "deltas", **run, "pos": 2, "n": 1, "end": "length"},
        )
    ]


def test_who_drops_all_runs_and_sends_hello_with_the_newest_token(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, step_us=2000) as worker:
        worker.welcome(7, "second")
        worker.work(1, max_tokens=100_000)
        worker.receive(kinds.DELTAS)
        for _ in range(3):
            worker.say(kinds.WHO)
        hello = worker.receive(kinds.HELLO)
        assert hello.body["token"] == "second"
        worker.epoch = 8
        worker.say(kinds.WELCOME, {"token": "third"})
        credit = worker.receive(kinds.CREDIT, kinds.DELTAS, kinds.HELLO)
        while credit.kind == kinds.HELLO:  # `hello` is repeated after a second without a welcome
            assert credit.body == hello.body
            credit = worker.receive(kinds.CREDIT, kinds.DELTAS, kinds.HELLO)
        assert (credit.kind, credit.header.epoch) == (kinds.CREDIT, 8)
        assert credit.body == {"sequences": 8, "works": 0}
        worker.work(2, max_tokens=4)
        received = worker.deltas_until(2)
        assert set(received) == {2} and ids_of(received[2]) == expected_ids("xyz", 2, 4)
        until(lambda: worker.block.read().phase == "idle", "the old run is gone")


def test_who_repeats_an_unanswered_hello(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path) as worker:
        first = worker.receive(kinds.HELLO)
        worker.say(kinds.WHO)
        assert worker.receive(kinds.HELLO, no=(kinds.CREDIT, kinds.BEAT)).body == first.body
        worker.epoch = 1
        worker.say(kinds.WELCOME, {"token": "x"})
        assert worker.receive(kinds.CREDIT).header.epoch == 1


def test_a_silent_broker_is_dialled_again(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, step_us=2000) as worker:
        worker.welcome(7)
        worker.work(1, max_tokens=100_000)
        first, worker.hearing = worker.peer, False
        hello = worker.receive(kinds.HELLO)
        assert worker.peer != first and hello.body["token"] == "token-7"
        worker.hearing = True
        worker.epoch = 8
        worker.say(kinds.WELCOME, {"token": "third"})
        while (message := worker.receive(kinds.CREDIT, kinds.DELTAS)).kind == kinds.DELTAS:
            assert message.header.epoch == 7, "only what the old connection still held"
        assert message.header.epoch == 8


def test_silence_counts_only_time_in_which_the_loop_turned() -> None:
    silence = Silence()
    assert not silence.turn(100.0)
    assert not silence.turn(100.0 + 3600)  # the process was stopped for an hour
    assert silence.since_dialled == MAX_COUNTED_TURN
    silence.heard()
    turns = [silence.turn(3700.0 + second) for second in range(1, 8)]
    assert turns.index(True) + 1 == SILENCE_LIMIT


def test_unsent_frames_are_dropped_with_their_epoch(tmp_path: Path) -> None:
    link = Link(f"ipc://{tmp_path}/nobody", "token", History("test", ""))
    try:
        link.introduce(Hello("a/0"), 10.0)
        link.put([b"of no epoch"])
        welcome = Welcome(token="next")
        assert link.welcome(4, welcome) and not link.unsent
        link.put([b"of epoch 4"])
        assert not link.welcome(4, welcome) and link.unsent, "the same welcome twice"
        assert link.lose_epoch(10.2) and not link.lose_epoch(10.3)
        link.send_due_hello(10.5)
        assert link.epoch == 0, "hello is said once a second at most"
        link.send_due_hello(11.0)
        (hello,) = link.unsent
        assert Hello.parse(frames.decode(hello).body) == Hello("a/0", token="next")
    finally:
        link.unsent.clear()
        link.handshake.close()
        link.socket.close(linger=0)
        link.context.term()


def test_deltas_that_are_too_large_for_one_message_are_sent_in_several(tmp_path: Path) -> None:
    link = Link(f"ipc://{tmp_path}/nobody", "token", History("test", ""))
    sent = [
        Delta(id_of(name), 1, 0, "é" * (50_000 * (name % 3)), pack_ids([name]))
        for name in range(1, 20)
    ]
    try:
        link.send_deltas(sent)
        assert not link.unsent, "there is no epoch"
        link.welcome(4, Welcome(token="next"))
        link.send_deltas(sent[:3])
        assert len(link.unsent) == 1
        link.send_deltas(sent[3:])
        messages = [frames.decode(frame, max_body=MAX_BACK_BODY) for frame in link.unsent]
        assert 3 < len(messages) < 12
        assert [delta for message in messages for delta in deltas.unpack_deltas(message)] == sent
        with pytest.raises(TooLarge, match="at most"):
            link.send_deltas([sent[0]._replace(text="x" * MAX_BACK_BODY)])
    finally:
        link.unsent.clear()
        link.close()


def test_drain_yields_all_runs_once_after_their_deltas(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, sequences=2, step_us=2000) as worker:
        worker.welcome(3)
        for name in (1, 2, 3):  # the third request waits inside the worker
            worker.work(name, max_tokens=100_000)
        worker.receive(kinds.DELTAS)
        worker.say(kinds.DRAIN)
        worker.say(kinds.DRAIN)
        handed = worker.receive(kinds.YIELD)
        assert sorted(map(tuple, handed.body["runs"])) == [(id_of(n), 1) for n in (1, 2, 3)]
        credit = worker.receive(kinds.CREDIT, no=(kinds.DELTAS, kinds.YIELD))
        assert credit.body["sequences"] == 0
        worker.work(4)
        late = worker.receive(kinds.YIELD, no=(kinds.DELTAS,))
        assert late.body["runs"] == [[id_of(4), 1]]
        worker.say(kinds.STOP)
        assert worker.receive(kinds.BYE, no=(kinds.DELTAS, kinds.YIELD)).body == {}
        assert worker.ended() == 0
        assert [line["id"][:2] for line in worker.history() if line["what"] == "yield"] == [
            "01",
            "02",
            "03",
            "04",
        ]


def test_a_resume_continues_at_its_position(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path) as worker:
        worker.welcome(1)
        ids = expected_ids("xyz", 1, 9)
        worker.work(1, "xyz", pack_ids(ids[:4]), resume={"count": 4, "facts": None}, max_tokens=9)
        received = worker.deltas_until(1)[1]
        assert received[0].pos == 4 and ids_of(received) == ids[4:]
        assert "".join(delta.text for delta in received) == text_of(ids[4:])


def test_a_worker_is_ready_when_requests_can_be_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(
        f"ipc://{tmp_path}/back", "m/0", TOKEN, "m", ModelConfig(path="builtin:counting")
    )
    edge, calls = build(config), list[Callable[[], None]]()
    ready: list[int] = []
    monkeypatch.setattr(edge.intake, "loaded", ready.append)

    def is_ready(again: Callable[[], None]) -> bool:
        calls.append(again)
        return len(calls) > 1

    monkeypatch.setattr(edge.intake, "is_ready", is_ready)
    try:
        edge.handle_mail(Loaded(3))
        assert not ready
        calls[0]()
        edge.handle_mail(next(edge.mailbox.take()))
        assert ready == [3]
    finally:
        edge.link.close()
        edge.mailbox.waker.close()


def test_the_intake_uses_the_time_after_a_while_without_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(
        f"ipc://{tmp_path}/back", "m/0", TOKEN, "m", ModelConfig(path="builtin:counting")
    )
    edge, rests, now = build(config), list[float](), 0.0
    monkeypatch.setattr(edge.intake, "rest", lambda: rests.append(now))
    key = id_of(1), 1
    try:
        for now in (100.0, 110.0):
            edge.rest(now)
        edge.handle_mail(Loaded(3))
        edge.intake.tasks[key] = Task(key, key)
        for now in (110.0, 111.0, 120.0):
            edge.rest(now)
        edge.intake.tasks.clear()
        assert not rests
        for now in (121.0, 120.0 + REST_TIME - 0.1, 120.0 + REST_TIME):
            edge.rest(now)
        assert rests == [120.0 + REST_TIME]
    finally:
        edge.link.close()
        edge.mailbox.waker.close()
