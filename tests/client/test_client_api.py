"""Client and AsyncClient against a fake broker that the test controls."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.client import AsyncClient, ChatTokens, Client
from mlxpool.common.errors import BadRequest, BrokerLost, DuplicateId, QueueFull, UnknownModel
from mlxpool.common.protocol import deltas, frames
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.fake_broker import NEVER, NO_RESEND_PACE, PATIENCE, FakeBroker
from support.pool import connection_of


@pytest.fixture
def broker(closed_broker: FakeBroker) -> FakeBroker:
    """A broker whose socket is not open yet, because some tests begin without a broker."""
    return closed_broker


# ---- streams -------------------------------------------------------------------------------------


def test_a_whole_stream(broker: FakeBroker, client: Client) -> None:
    stream = client.stream("m", "hello", temperature=0, deadline_ms=5)
    with pytest.raises(RuntimeError, match="not over"):
        _ = stream.result
    request = broker.open().accept()
    sent = broker.seen[0]
    assert request == stream.id and sent.header.attempt == 1
    assert sent.body["options"] == {"temperature": 0} and sent.body["deadline_ms"] == 5
    broker.tokens(request, 0, 2)
    broker.tokens(request, 2)
    broker.done(request, 3)
    assert [delta.ids for delta in stream] == [(0, 1), (2,)]
    assert (stream.result.text, stream.result.ids) == ("xxx", (0, 1, 2))
    assert list(stream) == []


def test_grouped_deltas_reach_their_streams(broker: FakeBroker, client: Client) -> None:
    first, second = (client.stream("m", "a", batch=True) for _ in range(2))
    broker.open()
    ids = [broker.accept() for _ in range(2)]
    assert ids == [first.id, second.id]
    rows = [deltas.Delta(i, 1, 0, "ab"[n], pack_ids([n])) for n, i in enumerate(ids)]
    foreign = deltas.Delta(first.id, 9, 0, "late", pack_ids([7]))
    message = deltas.Deltas([*rows, foreign])
    body, (blob,) = message.body(), message.blobs()
    broker.say(kinds.DELTAS, None, body, blob)
    for ident in ids:
        broker.done(ident, 1)
    assert (first.read().text, second.read().text) == ("a", "b")


def test_an_error_is_raised_by_every_way_to_read(broker: FakeBroker, client: Client) -> None:
    streams = [client.stream("m", "a") for _ in range(3)]
    broker.open()
    for stream in streams:
        broker.receive(kinds.GENERATE)
        broker.say(kinds.ERROR, stream.id, {"code": "queue_full", "message": "no"})
    with pytest.raises(QueueFull, match="no"):
        streams[0].read()
    with pytest.raises(QueueFull):
        list(streams[1])
    with pytest.raises(QueueFull), streams[2] as stream:
        next(iter(stream))
    with pytest.raises(QueueFull):
        _ = streams[2].result


def test_an_error_about_a_stream_not_yet_accepted_ends_it(
    broker: FakeBroker, client: Client
) -> None:
    stream = client.stream("m", "a")
    broker.open().receive(kinds.GENERATE)
    body = {"code": "duplicate_id", "message": "taken", "about": stream.id}
    broker.say(kinds.ERROR, None, body, attempt=1)
    with pytest.raises(DuplicateId, match="taken"):
        stream.read()


def test_an_error_about_a_live_stream_ends_nothing(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    for about in (request, bytes(16), None):
        broker.say(kinds.ERROR, None, {"code": "bad_request", "message": "x", "about": about})
    broker.done(request, 0)
    assert stream.read().reason == "stop"


# ---- without a broker ----------------------------------------------------------------------------


def test_no_broker_ever_answers(broker: FakeBroker) -> None:
    with broker.client(connect_timeout=0.2) as client:
        with pytest.raises(BrokerLost, match="no broker answers at ipc://"):
            client.generate("m", "a")
        with pytest.raises(BrokerLost):
            client.models()


def test_a_broker_that_falls_silent(broker: FakeBroker) -> None:
    with broker.client(broker_grace=0.3) as client:
        stream, request = broker.stream_of(client)
        broker.tokens(request, 0)
        with pytest.raises(BrokerLost):
            stream.read()


def test_pings_keep_a_slow_stream_alive(broker: FakeBroker) -> None:
    with broker.client(broker_grace=PATIENCE) as client:
        stream, request = broker.stream_of(client)
        for _ in range(5):
            broker.receive(kinds.PING)
        broker.done(request, 0)
        assert stream.read().reason == "stop"


def test_a_broker_that_starts_late_gets_requests_sent_before(
    broker: FakeBroker, client: Client
) -> None:
    stream = client.stream("m", "a")
    time.sleep(0.1)
    broker.open()
    broker.done(broker.accept(), 0)
    assert stream.read().reason == "stop"


def test_a_call_given_up_long_ago_does_not_end_the_next_one(broker: FakeBroker) -> None:
    async def story() -> Any:
        async with broker.async_client() as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.models(), 0.1)
            connection = connection_of(client)
            while connection.waits():  # until the client's thread has removed the call
                await asyncio.sleep(0.001)
            timer = connection.timer  # as if the removed call had been sent long ago
            timer._waiting_since = timer._connected_at = -2.0 * PATIENCE
            later = asyncio.ensure_future(client.models())
            await asyncio.sleep(0)
            broker.open()
            return await answered(broker, later)

    assert asyncio.run(story()) == []


async def answered(broker: FakeBroker, call: asyncio.Future[Any]) -> Any:
    """Answers the newest `models` call, unless it has ended before."""
    while not call.done():
        assert broker.socket is not None
        if not await asyncio.to_thread(broker.socket.poll, 20):
            continue
        broker.peer, *parts = broker.socket.recv_multipart()
        message = frames.decode(parts)
        if message.kind == kinds.MODELS:
            broker.say(kinds.MODELS, message.header.id, {"models": []}, attempt=0)
        await asyncio.sleep(0)
    return call.result()


# ---- cancel and ack ------------------------------------------------------------------------------


def test_leaving_the_loop_cancels(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0)
    for _ in stream:
        break
    assert broker.receive(kinds.CANCEL).header.id == request
    stream.close()
    broker.say(kinds.FATE, request, {"state": "streaming", "pos": 1}, attempt=0)
    broker.done(request, 1, "cancelled")


def test_a_stream_that_is_dropped_unread_is_cancelled(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    del stream
    assert broker.receive(kinds.CANCEL).header.id == request


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_cannot_be_pickled_and_says_what_to_do(kind: type, tmp_path: Path) -> None:
    instance = kind(tmp_path)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="make a client where it is used"):
            copied(instance)


def test_a_stream_cannot_be_pickled(broker: FakeBroker, client: Client) -> None:
    with (
        client.stream("m", "a") as stream,
        pytest.raises(TypeError, match="send the run directory or the endpoint"),
    ):
        pickle.dumps(stream)


def test_closing_the_iterator_cancels(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0)
    iterator = iter(stream)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert broker.receive(kinds.CANCEL).header.id == request


def test_the_end_of_a_with_cancels_even_when_the_client_closes_at_once(
    broker: FakeBroker,
) -> None:
    with (
        broker.client() as client,
        client.stream("m", "a") as stream,
    ):
        broker.open().accept()
    assert broker.receive(kinds.CANCEL).header.id == stream.id


def test_a_finished_stream_is_not_cancelled(broker: FakeBroker, client: Client) -> None:
    with client.stream("m", "a") as stream:
        broker.done(broker.open().accept(), 0)
        stream.read()
    stream.close()
    stream = client.stream("m", "b")
    broker.done(broker.accept(), 0)
    stream.read()
    assert kinds.CANCEL not in broker.kinds()


def test_an_ack_after_64_ids(broker: FakeBroker) -> None:
    with broker.client(pace=replace(NO_RESEND_PACE, ping=NEVER)) as client:
        acks_of_many_ids(broker, client)


def acks_of_many_ids(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    iterator = iter(stream)
    for pos in range(63):
        broker.tokens(request, pos)
        next(iterator)
    broker.tokens(request, 63)
    assert kinds.ACK not in broker.kinds()
    next(iterator)
    assert broker.receive(kinds.ACK).body["have"] == [[request, 64]]
    broker.tokens(request, 64, 100)
    next(iterator)
    assert broker.receive(kinds.ACK).body["have"] == [[request, 164]]
    broker.done(request, 164)
    assert len(stream.read().ids) == 164


def test_the_rest_is_acknowledged_with_the_next_ping(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    broker.tokens(request, 0, 3)
    next(iter(stream))
    assert broker.receive(kinds.ACK).body["have"] == [[request, 3]]


def test_unread_ids_are_not_acknowledged(broker: FakeBroker, client: Client) -> None:
    client.stream("m", "a")
    broker.tokens(broker.open().accept(), 0, 100)
    for _ in range(3):
        broker.receive(kinds.PING)
    assert kinds.ACK not in broker.kinds()


# ---- calls ---------------------------------------------------------------------------------------


def test_calls(broker: FakeBroker, client: Client) -> None:
    broker.open()
    with ThreadPoolExecutor(1) as pool:
        models = pool.submit(client.models)
        ident = broker.receive(kinds.MODELS).header.id
        broker.say(kinds.MODELS, ident, {"models": [{"name": "m"}]}, attempt=0)
        assert models.result(PATIENCE) == [{"name": "m"}]
        tokens = pool.submit(client.tokenize, "m", "text")
        asked = broker.receive(kinds.TOKENIZE)
        assert asked.body == {"model": "m", "text": "text"}
        broker.say(kinds.TOKENS, asked.header.id, {}, pack_ids([4, 5]), attempt=0)
        assert tokens.result(PATIENCE) == [4, 5]
        text = pool.submit(client.detokenize, "m", [4, 5])
        asked = broker.receive(kinds.DETOKENIZE)
        assert asked.blobs == (pack_ids([4, 5]),)
        broker.say(kinds.TOKENS, asked.header.id, {"text": "text"}, attempt=0)
        assert text.result(PATIENCE) == "text"
        fate = pool.submit(client.cancel, bytes(16))
        assert broker.receive(kinds.CANCEL).header.id == bytes(16)
        broker.say(kinds.FATE, bytes(16), {"state": "done", "pos": 3}, attempt=0)
        assert fate.result(PATIENCE) == {"state": "done", "pos": 3}
        wrong = pool.submit(client.tokenize, "x", "text")
        ident = broker.receive(kinds.TOKENIZE).header.id
        broker.say(kinds.ERROR, ident, {"code": "unknown_model", "message": "no"}, attempt=0)
        with pytest.raises(UnknownModel):
            wrong.result(PATIENCE)


def test_invalid_frames_are_ignored(broker: FakeBroker, client: Client) -> None:
    stream, request = broker.stream_of(client)
    assert broker.socket is not None
    for parts in ([b"garbage"], [b"", b""], [b"\xc1"] * 9):
        broker.socket.send_multipart([broker.peer, *parts])
    broker.say("news", request, {"a": 1})
    broker.say(kinds.FATE, bytes(16), {"state": "done", "pos": 3})
    broker.done(request, 0)
    assert stream.read().reason == "stop"


# ---- closing the client --------------------------------------------------------------------------


def test_a_client_that_was_never_used() -> None:
    with Client("/nowhere"):
        pass


def test_closing_ends_open_streams_and_the_thread(broker: FakeBroker) -> None:
    before = set(threading.enumerate())
    client = broker.client()
    stream = client.stream("m", "a")
    broker.open().accept()
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["mlxpool"]
    client.close()
    assert broker.receive(kinds.CANCEL).header.id == stream.id
    with pytest.raises(BrokerLost, match="was closed before"):
        stream.read()
    stream.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(BrokerLost, match="the client is closed"):
        client.stream("m", "a")
    client.close()


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="at most 107"):
        Client("/" + "x" * 200)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [
        ("foo", ""),
        ("carrier://pigeon", ""),
        ("tcp://pool", ""),
        ("tcp://*:7200", ""),
        ("tcp://pool:0", ""),
        ("tcp://pool:70000", ""),
        ("tcp://pool:7200/v1", ""),
        ("ipc://", ""),
        ("pool:7200", "did you mean 'tcp://pool:7200'?"),
        ("/run/mlxpool/front.ipc", "did you mean 'ipc:///run/mlxpool/front.ipc'"),
        (7200, ""),
    ],
)
def test_a_malformed_endpoint(kind: type[Client], endpoint: Any, hint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        kind(endpoint=endpoint)
    assert "must be tcp://HOST:PORT or ipc://PATH" in str(caught.value)
    assert repr(endpoint) in str(caught.value) and hint in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["tcp://my_host.a-b:7200", "tcp://[fe80::1%eth0]:1", "ipc://@x"]
)
def test_a_well_formed_endpoint(endpoint: str) -> None:
    Client(endpoint=endpoint).close()


def test_an_endpoint_in_the_place_of_the_run_directory() -> None:
    with pytest.raises(BadRequest, match="give it as endpoint="):
        Client("tcp://pool:7200")


@pytest.mark.parametrize(
    ("seconds", "asked", "held", "answer"),
    [(60, 60_000, 60_000, 60.0), (0, 0, 0, 0.0), (-1, -1, 5000, 5.0), (0.0005, 1, -1, -1.0)],
)
def test_keep(
    broker: FakeBroker, client: Client, seconds: float, asked: int, held: int, answer: float
) -> None:
    broker.open()
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(client.keep, "m", seconds)
        message = broker.receive(kinds.KEEP)
        assert message.body == {"model": "m", "keep_ms": asked}
        broker.say(kinds.KEPT, message.header.id, {"keep_ms": held}, attempt=0)
        assert kept.result(PATIENCE) == answer


@pytest.mark.parametrize("seconds", [10**9, float("nan"), float("inf"), "5m", None, True])
def test_a_time_that_no_model_is_kept_for(client: Client, seconds: Any) -> None:
    with pytest.raises(BadRequest, match=r"seconds is .*, must be at most 100000000"):
        client.keep("m", seconds)


def test_a_chat_in_token_ids_and_all_that_is_known_of_a_model(
    broker: FakeBroker, client: Client
) -> None:
    broker.open()
    hi = [{"role": "user", "content": "hi"}]
    with ThreadPoolExecutor(1) as pool:
        chat = pool.submit(client.tokenize_chat, "m", hi, tools=[{"name": "f"}], think=False)
        message = broker.receive(kinds.TOKENIZE)
        tools = [{"name": "f"}]
        assert message.body == {"model": "m", "messages": hi, "tools": tools, "think": False}
        ids = pack_ids([4, 5])
        broker.say(kinds.TOKENS, message.header.id, {"n": 2, "thinks": True}, ids, attempt=0)
        assert chat.result(PATIENCE) == ChatTokens([4, 5], thinks=True)
        about = pool.submit(client.describe, "m")
        message = broker.receive(kinds.MODELS)
        assert message.body == {"model": "m"}
        row = {"name": "m", "about": {"layers": 2}}
        broker.say(kinds.MODELS, message.header.id, {"models": [row]}, attempt=0)
        assert about.result(PATIENCE) == row


# ---- asyncio -------------------------------------------------------------------------------------


async def test_async_streams_and_calls(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        stream = client.stream("m", "a")
        request = await asyncio.to_thread(broker.open().accept)
        broker.tokens(request, 0, 2)
        broker.done(request, 2)
        assert [delta.ids async for delta in stream] == [(0, 1)]
        assert stream.result.ids == (0, 1)
        models = asyncio.ensure_future(client.models())
        message = await asyncio.to_thread(broker.receive, kinds.MODELS)
        broker.say(kinds.MODELS, message.header.id, {"models": []}, attempt=0)
        assert await models == []


async def test_a_cancelled_task_cancels_its_request(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        task = asyncio.ensure_future(client.generate("m", "a"))
        request = await asyncio.to_thread(broker.open().accept)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        message = await asyncio.to_thread(broker.receive, kinds.CANCEL)
        assert message.header.id == request


async def test_leaving_an_async_loop_cancels(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        async with client.stream("m", "a") as stream:
            request = await asyncio.to_thread(broker.open().accept)
            broker.tokens(request, 0)
            async for _ in stream:
                break
        message = await asyncio.to_thread(broker.receive, kinds.CANCEL)
        assert message.header.id == request


async def test_an_async_stream_that_is_dropped_unread_is_cancelled(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        stream = client.stream("m", "a")
        request = await asyncio.to_thread(broker.open().accept)
        broker.tokens(request, 0)
        del stream
        message = await asyncio.to_thread(broker.receive, kinds.CANCEL)
        assert message.header.id == request
        iterator = aiter(client.stream("m", "b"))
        request = await asyncio.to_thread(broker.accept)
        broker.tokens(request, 0)
        await anext(iterator)
        del iterator
        message = await asyncio.to_thread(broker.receive, kinds.CANCEL)
        assert message.header.id == request


async def test_async_errors(broker: FakeBroker) -> None:
    async with broker.async_client(connect_timeout=0.2) as client:
        with pytest.raises(BrokerLost):
            await client.generate("m", "a")
        with pytest.raises(BrokerLost):
            await client.models()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": 5}, "a text must be a str, got 5"),
        ({"messages": "abc"}, "messages must be a list of maps, got 'abc'"),
        ({"messages": ["abc"]}, r"messages must be a list of maps, got \['abc'\]"),
        ({"messages": 5}, "messages must be a list of maps, got 5"),
        ({"tokens": []}, "tokens has no id; a prompt is 1 or more"),
        ({"tokens": [3, -1]}, "integers from 0 to 4294967295, got -1 at 1"),
        ({"tokens": [2**33]}, "integers from 0 to 4294967295, got 8589934592 at 0"),
        ({"tokens": "abc"}, "integers from 0 to 4294967295, got 'abc'"),
    ],
)
def test_an_invalid_prompt_is_refused_by_the_client(asked: dict[str, Any], words: str) -> None:
    with Client("/nowhere") as client, pytest.raises(BadRequest, match=words):
        client.stream("m", **asked)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


HUGE: Any = 10**4400  # Python does not print an integer of this many digits
DEEP: Any = nested(5000)
CHAT: Any = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": [{"role": "user", "content": DEEP}]}, "messages is nested deeper than 32"),
        ({"messages": [{"role": "user", "n": HUGE}]}, r"messages\[0\]\.n .* at most 64 bits"),
        ({"messages": [{"role": "user", HUGE: 1}]}, r"messages\[0\] has the key"),
        ({"messages": DEEP}, "a list of maps"),
        ({"messages": CHAT, "tools": [{"function": DEEP}]}, "tools is nested deeper than 32"),
        ({"messages": CHAT, "tools": [{"function": HUGE}]}, r"tools\[0\]\.function .* 64 bits"),
        ({"prompt": HUGE}, "a text must be a str"),
        ({"prompt": DEEP}, "a text must be a str"),
        ({"tokens": [1, HUGE]}, "token ids .* at 1"),
        ({"tokens": DEEP}, "token ids"),
        ({"prompt": "x", "max_tokens": HUGE}, r"options\.max_tokens .* 64 bits"),
        ({"prompt": "x", "deadline_ms": HUGE}, "deadline_ms .* 64 bits"),
        ({"prompt": "x", "stop": DEEP}, "options is nested deeper than 32"),
        ({"prompt": "x", "logit_bias": {HUGE: 1}}, "logit_bias has the key"),
    ],
)
def test_what_cannot_be_sent_is_a_bad_request(
    broker: FakeBroker, client: Client, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest, match=words):
        client.stream("m", **given)
    with pytest.raises(BadRequest, match=words):
        client.generate("m", **given)

    async def ask() -> None:
        async with broker.async_client() as other:
            with pytest.raises(BadRequest, match=words):
                await other.generate("m", **given)

    asyncio.run(ask())


@pytest.mark.parametrize("value", [HUGE, DEEP], ids=["huge", "deep"])
def test_a_call_that_cannot_be_sent_is_a_bad_request(
    broker: FakeBroker, client: Client, value: Any
) -> None:
    calls = (client.tokenize, client.detokenize)
    for call in (*(partial(each, "m", value) for each in calls), partial(client.cancel, value)):
        with pytest.raises(BadRequest):
            call()
    with pytest.raises(BadRequest, match="cannot be sent: model"):
        client.tokenize(value, "x")

    async def ask() -> None:
        async with broker.async_client() as other:
            with pytest.raises(BadRequest):
                await other.tokenize("m", value)
            with pytest.raises(BadRequest):
                await other.detokenize("m", [value])

    asyncio.run(ask())


def test_a_call_that_nobody_waits_for_is_cancelled(broker: FakeBroker) -> None:
    async def ask() -> None:
        async with broker.async_client() as client:
            task = asyncio.ensure_future(client.tokenize("m", "text"))
            asked = await asyncio.to_thread(broker.receive, kinds.TOKENIZE)
            task.cancel()
            cancel = await asyncio.to_thread(broker.receive, kinds.CANCEL)
            assert cancel.header.id == asked.header.id
            models = asyncio.ensure_future(client.models())
            await asyncio.to_thread(broker.receive, kinds.MODELS)
            models.cancel()
            await asyncio.gather(models, return_exceptions=True)

    broker.open()
    asyncio.run(ask())
    assert broker.kinds().count(kinds.CANCEL) == 1


def test_a_call_that_the_broker_has_dropped_with_its_link_is_sent_again(broker: FakeBroker) -> None:
    """A new link number in the next `pong` tells the client that the broker forgot its calls."""
    broker.open()
    pace = replace(NO_RESEND_PACE, ping=NEVER)
    with (
        broker.client(pace=pace) as client,
        ThreadPoolExecutor() as pool,
    ):
        models = pool.submit(client.models)
        asked = broker.receive(kinds.MODELS, pongs=False)
        broker.say(kinds.MODELS, asked.header.id, {"models": []}, attempt=0)
        assert models.result(PATIENCE) == []
        call = pool.submit(client.tokenize, "m", "text")
        asked = broker.receive(kinds.TOKENIZE, pongs=False)
        broker.receive(kinds.PING)
        broker.number += 1
        broker.pong()
        assert broker.receive(kinds.TOKENIZE).header.id == asked.header.id
        broker.say(kinds.TOKENS, asked.header.id, {}, pack_ids([4]), attempt=0)
        assert call.result(PATIENCE) == [4]


def test_a_client_that_is_closed_cancels_its_calls(broker: FakeBroker, client: Client) -> None:
    broker.open()
    with ThreadPoolExecutor() as pool:
        call = pool.submit(client.detokenize, "m", [1])
        asked = broker.receive(kinds.DETOKENIZE)
        client.close()
        assert broker.receive(kinds.CANCEL).header.id == asked.header.id
        with pytest.raises(BrokerLost):
            call.result(PATIENCE)
