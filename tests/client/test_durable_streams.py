"""Durable streams after lost connections and brokers, against a fake broker of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.client import Client, Stream
from mlxpool.common.errors import BrokerLost, DuplicateId, TooLarge
from mlxpool.common.protocol import resume
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.token_ids import pack_ids
from mlxpool.common.trace import VARIABLE
from support import kinds
from support.fake_broker import FACTS, NEVER, NO_RESEND_PACE, PATIENCE, FakeBroker
from support.pool import connection_of, until

Lose = Callable[[FakeBroker, Stream], None]


def client_of(broker: FakeBroker, **pace: Any) -> AbstractContextManager[Client]:
    return broker.client(broker_grace=PATIENCE, pace=replace(NO_RESEND_PACE, **pace))


def restart(broker: FakeBroker, stream: Stream) -> None:
    broker.boot += 1


def relink(broker: FakeBroker, stream: Stream) -> None:
    broker.number += 1


def lose_a_frame(broker: FakeBroker, stream: Stream) -> None:
    broker.tokens(stream.id, 7)


def lose_before_the_end(broker: FakeBroker, stream: Stream) -> None:
    broker.done(stream.id, 7)


@pytest.mark.parametrize("lose", [restart, relink, lose_a_frame, lose_before_the_end])
def test_a_stream_is_resumed_from_the_ids_received(
    broker: FakeBroker, client: Client, lose: Lose
) -> None:
    given: dict[str, Any] = {
        "temperature": 0,
        "queue_ms": 7000,
        "first_token_ms": 7000,
        "deadline_ms": 3_600_000,
    }
    stream, request = broker.stream_of(client, "hello", **given)
    broker.tokens(request, 0, 2, facts=FACTS)
    lose(broker, stream)
    again = broker.receive(kinds.GENERATE)
    assert again.header.id == request and again.header.attempt == 2
    left = again.body.pop("deadline_ms")
    assert 0 < left <= 3_600_000
    assert again.body == {
        "model": "m",
        "batch": True,
        "prompt": "hello",
        "options": {"temperature": 0},
        "resume": {"count": 2, "seed": 1, "resumes": 0, "facts": FACTS},
    }
    assert again.blobs == (pack_ids([0, 1]),)
    broker.say(kinds.DELTA, request, {"text": "late", "n": 1}, pack_ids([9]), pos=2, attempt=1)
    broker.accepted(request)
    broker.tokens(request, 2, 3)
    broker.done(request, 5)
    assert [delta.pos for delta in stream] == [0, 2]
    assert (stream.result.text, stream.result.ids) == ("xxxxx", (0, 1, 2, 3, 4))
    assert broker.attempts[request] == 2


def test_a_stream_with_durable_false_ends(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client, durable=False)
    broker.tokens(request, 0)
    broker.boot += 1
    broker.receive(kinds.PING)
    with pytest.raises(BrokerLost, match="broker was restarted"):
        stream.read()
    assert broker.kinds().count(kinds.GENERATE) == 1


def test_another_streams_accepted_shows_the_new_connection(broker: FakeBroker) -> None:
    with client_of(broker, ping=NEVER) as client:
        old = client.stream("m", "a")
        broker.accept()
        broker.number += 1
        new = client.stream("m", "b")
        assert broker.accept() == new.id
        assert broker.accept() == old.id
        for stream in (old, new):
            broker.done(stream.id, 0)
            assert stream.read().reason == "stop"


def test_a_request_without_accepted_is_sent_again(broker: FakeBroker) -> None:
    with client_of(broker, answer=(0.05, NEVER)) as client:
        stream = client.stream("m", "a", queue_ms=5)
        assert broker.receive(kinds.GENERATE).header.attempt == 1
        again = broker.receive(kinds.GENERATE)
        assert again.header.attempt == 2
        assert again.body == {"model": "m", "batch": True, "prompt": "a", "options": {}}
        broker.accepted(stream.id, seed=5, attempt=1)  # too late, because attempt 2 was sent
        broker.accepted(stream.id, seed=6)
        broker.tokens(stream.id, 0)
        broker.done(stream.id, 1)
        assert stream.read().seed == 6


def test_silence_replaces_the_connection(broker: FakeBroker) -> None:
    """A client that hears nothing makes a new connection, while the old one stays open."""
    with client_of(broker, silence=2.0) as client, ThreadPoolExecutor(1) as pool:
        stream, request = broker.stream_of(client)
        broker.tokens(request, 0, 2)
        call = pool.submit(client.tokenize, "m", "text")
        first = broker.receive(kinds.TOKENIZE)
        old = broker.peer
        while broker.peer == old:
            again = broker.receive(kinds.GENERATE, pongs=False)
        assert again.body["resume"]["count"] == 2
        asked = [message for message in broker.seen if message.kind == kinds.TOKENIZE]
        assert len(asked) > 1 and {message.header.id for message in asked} == {first.header.id}
        broker.say(kinds.TOKENS, first.header.id, {}, pack_ids([4]))
        broker.accepted(request)
        broker.tokens(request, 2)
        broker.done(request, 3)
        assert stream.read().ids == (0, 1, 2)
        assert call.result(PATIENCE) == [4]


def test_resumes_counts_brokers_that_sent_no_id(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0)
    counts = []
    for _ in range(2):
        broker.boot += 1
        counts.append(broker.receive(kinds.GENERATE).body["resume"]["resumes"])
        broker.accepted(request)
    broker.tokens(request, 1)
    broker.done(request, 2)
    assert stream.read().ids == (0, 1)
    assert counts == [0, 1]


# ---- errors that do not end a stream -------------------------------------------------------------


def test_a_broker_that_drains(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0)
    broker.error(request, "draining", retry_after_ms=1)
    assert broker.receive(kinds.GENERATE).body["resume"]["count"] == 1
    broker.error(request, "queue_full", retry_after_ms=1)
    assert broker.accept() == request
    broker.done(request, 1)
    assert stream.read().ids == (0,)


def test_a_duplicate_id_ends_the_newest_sending_only(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.number += 1
    assert broker.accept() == request
    for attempt in (1, 2):
        body = {"code": "duplicate_id", "message": f"about {attempt}", "about": request}
        broker.say(kinds.ERROR, None, body, attempt=attempt)
    with pytest.raises(DuplicateId, match="about 2"):
        stream.read()


def test_a_resume_that_is_too_large_ends_the_stream(
    broker: FakeBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0, 20)
    iterator = iter(stream)
    next(iterator)
    monkeypatch.setattr(resume, "MAX_BLOB", 79)
    broker.number += 1
    broker.receive(kinds.PING)
    with pytest.raises(TooLarge, match="80 bytes, at most 79"):
        next(iterator)


# ---- ends that the client decides ----------------------------------------------------------------


def test_the_client_ends_a_stream_after_its_deadline(broker: FakeBroker) -> None:
    with client_of(broker, overdue=0.05) as client:
        connected = client.stream("m", "a")
        broker.done(broker.accept(), 0)
        assert connected.read().reason == "stop"
        stream = client.stream("m", "a", deadline_ms=30)
        broker.accept()
        with pytest.raises(BrokerLost, match=r"deadline passed .* at ipc://"):
            stream.read()


def test_a_broker_that_starts_late_does_not_get_ended_requests(broker: FakeBroker) -> None:
    broker.close()
    late = FakeBroker(broker.run_dir)
    try:
        with broker.client(connect_timeout=0.1) as client:
            with pytest.raises(BrokerLost, match="no broker answers at ipc://"):
                client.generate("m", "a")
            # The next request waits for the broker, even if the broker is slow.
            connection_of(client).timer.pace = replace(NO_RESEND_PACE, connect_grace=PATIENCE)
            stream = client.stream("m", "b")
            assert late.open().accept() == stream.id
            late.done(stream.id, 0)
            assert stream.read().reason == "stop"
    finally:
        late.close()


# ---- cancel --------------------------------------------------------------------------------------


def test_a_cancel_is_sent_on_the_new_connection_and_the_stream_is_not(
    broker: FakeBroker, client: Client
) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0)
    iterator = iter(stream)
    next(iterator)
    broker.receive(kinds.PING)
    stream.close()
    assert broker.receive(kinds.CANCEL).header.id == request
    broker.number += 1
    broker.receive(kinds.PING)
    assert broker.receive(kinds.CANCEL).header.id == request
    broker.say(kinds.FATE, request, {"state": "unknown", "pos": 0}, attempt=0)
    assert settled(stream).result.reason == "cancelled"
    assert broker.kinds().count(kinds.GENERATE) == 1


def settled(stream: Stream) -> Stream:
    """Waits for the end of a stream whose reader has left."""

    def ended() -> bool:
        with contextlib.suppress(RuntimeError):  # raised before the stream's end
            _ = stream.result
            return True
        return False

    until(ended, "the stream has ended")
    return stream


def test_a_terminal_that_was_lost_is_not_waited_for(broker: FakeBroker) -> None:
    with client_of(broker, answer=(0.2, NEVER)) as client, ThreadPoolExecutor(1) as pool:
        stream, request = broker.stream_of(client)
        fate = pool.submit(client.cancel, request)
        broker.receive(kinds.CANCEL)
        broker.say(kinds.FATE, request, {"state": "done", "pos": 3}, attempt=0)
        assert fate.result(PATIENCE) == {"state": "done", "pos": 3}
        assert stream.read().reason == "cancelled"


def test_a_terminal_after_the_fate_counts(broker: FakeBroker, client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        stream, request = broker.stream_of(client)
        fate = pool.submit(client.cancel, request)
        broker.receive(kinds.CANCEL)
        broker.say(kinds.FATE, request, {"state": "done", "pos": 0}, attempt=0)
        fate.result(PATIENCE)
        broker.done(request, 0)
        assert stream.read().reason == "stop"


# ---- acks ----------------------------------------------------------------------------------------


def test_acks_after_a_resume(broker: FakeBroker) -> None:
    with client_of(broker, ping=0.02) as client:
        stream, request = broker.stream_of(client)
        broker.tokens(request, 0)
        broker.tokens(request, 1, 2)
        assert broker.receive(kinds.PING)
        broker.number += 1
        assert broker.receive(kinds.GENERATE).body["resume"]["count"] == 3
        iterator = iter(stream)
        next(iterator)
        before = len(broker.seen)
        next(iterator)  # all three ids are read; the broker knows it from the resume
        for _ in range(3):
            broker.receive(kinds.PING)
        broker.accepted(request)
        broker.tokens(request, 3)
        next(iterator)
        assert broker.receive(kinds.ACK).body["have"] == [[request, 4]]
        acks = [m for m in broker.seen[before:] if m.kind == kinds.ACK]
        assert [ack.body["have"] for ack in acks] == [[[request, 4]]]
        broker.done(request, 4)


# ---- calls ---------------------------------------------------------------------------------------


def call(broker: FakeBroker, message: Message, body: dict[str, Any], *blobs: bytes) -> None:
    kind = kinds.ERROR if "code" in body else kinds.TOKENS
    broker.say(kind, message.header.id, body, *blobs)


def test_a_call_is_sent_on_the_new_connection(broker: FakeBroker) -> None:
    with client_of(broker, answer=(0.02, 0.02)) as client, ThreadPoolExecutor(1) as pool:
        tokens = pool.submit(client.tokenize, "m", "text")
        first = broker.receive(kinds.TOKENIZE)
        broker.receive(kinds.PING)
        broker.receive(kinds.PING)
        broker.number += 1
        second = broker.receive(kinds.TOKENIZE)
        assert second == first
        call(broker, second, {"code": "duplicate_id", "message": "under way"})
        call(broker, broker.receive(kinds.TOKENIZE), {}, pack_ids([4]))
        assert tokens.result(PATIENCE) == [4]


def test_a_call_that_is_answered_at_once_is_repeated(broker: FakeBroker) -> None:
    with client_of(broker, answer=(0.05, NEVER)) as client, ThreadPoolExecutor(1) as pool:
        models = pool.submit(client.models)
        first = broker.receive(kinds.MODELS)
        second = broker.receive(kinds.MODELS)
        assert second == first
        for _ in range(2):
            broker.say(kinds.MODELS, first.header.id, {"models": []})
        assert models.result(PATIENCE) == []


def test_two_cancels_of_one_request_both_get_the_answer(broker: FakeBroker, client: Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        fates = [pool.submit(client.cancel, bytes(16)) for _ in range(2)]
        for _ in fates:
            broker.receive(kinds.CANCEL)
        broker.say(kinds.FATE, bytes(16), {"state": "done", "pos": 3})
        assert [fate.result(PATIENCE)["pos"] for fate in fates] == [3, 3]


# ---- asyncio, trace ------------------------------------------------------------------------------


async def test_the_async_client_resumes(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        stream = client.stream("m", "a")
        request = await asyncio.to_thread(broker.accept)
        broker.tokens(request, 0)
        broker.boot += 1
        assert await asyncio.to_thread(broker.accept) == request
        broker.tokens(request, 1)
        broker.done(request, 2)
        assert [delta.ids async for delta in stream] == [(0,), (1,)]


def test_the_trace_has_every_event(
    broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with client_of(broker) as client:
        stream, request = broker.stream_of(client)
        broker.tokens(request, 0, 2)
        broker.number = 6
        broker.accept()
        broker.done(request, 2)
        stream.read()
    (path,) = tmp_path.glob("client-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["id"] for line in lines} == {request.hex()}
    events = [
        {k: v for k, v in line.items() if k not in ("t", "who", "pid", "id")} for line in lines
    ]
    assert events == [
        {"what": "submit"},
        {"what": "sent", "attempt": 1, "count": 0},
        {"what": "accepted", "attempt": 1, "boot": 11, "link": 5},
        {"what": "taken", "attempt": 1, "pos": 0, "ids": [0, 1]},
        {"what": "resend", "why": "the connection was lost"},
        {"what": "sent", "attempt": 2, "count": 2},
        {"what": "accepted", "attempt": 2, "boot": 11, "link": 6},
        {"what": "end", "reason": "stop"},
    ]
