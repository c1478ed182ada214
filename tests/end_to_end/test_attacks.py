"""Every attack of docs/security.md on a broker with CURVE, beside a stream that must continue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import zmq

from mlxpool.client import AsyncClient, Client
from mlxpool.common.errors import BrokerLost, PoolError, Unauthorized
from mlxpool.common.protocol import deltas, frames, token_ids
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials
from support import kinds
from support.bystander import Bystander
from support.counting_checker import expected_ids
from support.pool import PATIENCE, until
from support.secure_pool import COUNTING_MODEL, SecurePool

ALL = ("alice", "bob", "hand", "chief")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecurePool]:
    with SecurePool(tmp_path_factory.mktemp("secure"), models=COUNTING_MODEL.format(1000)) as pool:
        yield pool


@pytest.fixture
def bystander(secure: SecurePool) -> Iterator[Bystander]:
    with Bystander(partial(secure.dial, "bob")) as observer:
        yield observer
        observer.check_unaffected()


@pytest.fixture
def all_keys_after(secure: SecurePool) -> Iterator[None]:
    yield
    secure.write(*ALL)
    secure.reload()


def peer(secure: SecurePool, name: str, socket: str) -> zmq.Socket[bytes]:
    """Returns a plain DEALER socket with this key; the caller closes it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    credentials = Credentials.of(secure.server_key, secure.keys.path(name))
    return sockets.dealer(context, secure.endpoint(socket), credentials)


def say(socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
    """Sends a message, or does nothing if libzmq has given up the connection."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(parts, zmq.NOBLOCK)


def generate(prompt: str, **options: object) -> list[bytes]:
    body = {"model": "counting", "prompt": prompt, "options": {"max_tokens": 3, **options}}
    return frames.encode(Header(kinds.GENERATE, bytes(range(16))), body)


def test_a_key_on_the_list_is_served(secure: SecurePool) -> None:
    with secure.dial("alice") as client:
        result = client.generate("counting", "hello", seed=3, max_tokens=20)
    assert list(result.ids) == expected_ids("hello", 3, 20)

    async def ask() -> list[int]:
        endpoint, key = secure.endpoint("front"), secure.keys.path("alice")
        async with AsyncClient(
            endpoint=endpoint, server_key=secure.server_key, key=key, connect_timeout=PATIENCE
        ) as client:
            return list((await client.generate("counting", "hello", seed=3, max_tokens=5)).ids)

    assert asyncio.run(ask()) == expected_ids("hello", 3, 5)
    until(lambda: "owner=key:alice" in secure.log(), "its request is told")


def test_the_command_line_takes_flags_or_the_environment(
    secure: SecurePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("run", "counting", "hello", "--max-tokens", "3", "--seed", "3", "--json")
    done = secure.cli(*asked, *secure.flags("alice", "front"))
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("MLXPOOL_ENDPOINT", secure.endpoint("front"))
    monkeypatch.setenv("MLXPOOL_ADMIN_ENDPOINT", secure.endpoint("admin"))
    monkeypatch.setenv("MLXPOOL_SERVER_KEY", secure.server_key)
    command = (sys.executable, "-m", "mlxpool.cli.main")
    for verb, key, code in (
        (asked, "alice", 0),
        (asked, "chief", 1),
        (("ps",), "chief", 0),
        (("ps",), "alice", 1),
    ):
        monkeypatch.setenv("MLXPOOL_KEY", str(secure.keys.path(key)))
        ended = subprocess.run([*command, *verb], capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == code, ended.stderr
        assert code == 0 or f"refuses the key '{key}'" in ended.stderr


def test_a_key_that_others_can_read_is_not_used(secure: SecurePool) -> None:
    secure.keys.make("open", "client")
    secure.keys.path("open").chmod(0o640)
    done = secure.cli("run", "counting", "hello", *secure.flags("open", "front"))
    assert done.returncode == 2
    assert "mode 0640" in done.stderr and "chmod 600" in done.stderr


@pytest.mark.parametrize("name", ["hand", "chief", "stranger"])
def test_a_key_of_another_role_or_an_unknown_key_is_refused(
    secure: SecurePool, bystander: Bystander, name: str
) -> None:
    if name not in secure.keys.pairs:
        secure.keys.make(name, "client")
    before = secure.ask("stats")["auth_failures"]
    with secure.dial(name) as client, pytest.raises(Unauthorized) as raised:
        client.generate("counting", "hello", max_tokens=3)
    for part in (secure.endpoint("front"), repr(name), "allow-list", f"[keys.{name}]"):
        assert part in str(raised.value)
    assert secure.ask("stats")["auth_failures"] > before
    assert "connection refused" in secure.log()


def test_a_peer_without_a_key_is_refused(secure: SecurePool, bystander: Bystander) -> None:
    with (
        Client(endpoint=secure.endpoint("front"), connect_timeout=PATIENCE) as client,
        pytest.raises(Unauthorized, match="takes no connection without a key"),
    ):
        client.generate("counting", "hello", max_tokens=3)


def test_a_wrong_server_key_is_reported(secure: SecurePool, bystander: Bystander) -> None:
    wrong = secure.keys.pairs["bob"].public
    with (
        Client(
            endpoint=secure.endpoint("front"),
            server_key=wrong,
            key=secure.keys.path("alice"),
            connect_timeout=PATIENCE,
        ) as client,
        pytest.raises(Unauthorized, match="does not answer to the server key"),
    ):
        client.generate("counting", "hello", max_tokens=3)


def test_an_absent_broker_is_not_reported_as_a_key_error(secure: SecurePool) -> None:
    with (
        Client(
            endpoint="tcp://127.0.0.1:1",
            server_key=secure.server_key,
            key=secure.keys.path("alice"),
            connect_timeout=0.3,
        ) as client,
        pytest.raises(BrokerLost, match=r"no broker answers at tcp://127\.0\.0\.1:1"),
    ):
        client.generate("counting", "hello", max_tokens=3)


@pytest.mark.usefixtures("all_keys_after")
def test_a_refused_peer_is_accepted_once_its_key_is_listed(
    secure: SecurePool, bystander: Bystander
) -> None:
    secure.keys.make("late", "client")
    with secure.dial("late") as client:
        with pytest.raises(Unauthorized):
            client.generate("counting", "hello", max_tokens=3)
        secure.write(*ALL, "late")
        secure.reload()
        assert len(client.generate("counting", "hello", max_tokens=3).ids) == 3


@pytest.mark.usefixtures("all_keys_after")
def test_a_revoked_key_is_disconnected_at_once(secure: SecurePool, bystander: Bystander) -> None:
    with secure.dial("alice") as client:
        stream = client.stream("counting", "mine", seed=1, max_tokens=10**6)
        pieces = iter(stream)
        next(pieces)
        raw = peer(secure, "alice", "front")
        raw.send_multipart(frames.encode(Header(kinds.PING)))
        assert raw.poll(int(PATIENCE * 1000))
        raw.recv_multipart()
        secure.write("bob", "hand", "chief")
        secure.reload()
        assert not [r for r in secure.ask("requests")["requests"] if r["owner"] == "key:alice"]
        with pytest.raises(Unauthorized):
            for _ in pieces:
                pass
        with pytest.raises(Unauthorized, match="refuses the key 'alice'"):
            client.generate("counting", "again", max_tokens=3)
        accepted = secure.ask("stats")["requests"]["accepted"]
        say(raw, generate("late"))
        assert not raw.poll(200)
        raw.close(linger=0)
        assert secure.ask("stats")["requests"]["accepted"] == accepted


@pytest.mark.usefixtures("all_keys_after")
def test_a_plain_client_may_hear_nothing_of_its_revoked_key(
    secure: SecurePool, bystander: Bystander
) -> None:
    """The connection of a client without the library is closed right after `unauthorized` is sent.

    So the client may miss the error; the socket monitor reports the refusal.
    """
    ident, raw = os.urandom(16), peer(secure, "alice", "front")
    handshake = Handshake(raw, secure.endpoint("front"))
    body = {"model": "counting", "prompt": "mine", "options": {"max_tokens": 10**6}}
    raw.send_multipart(frames.encode(Header(kinds.GENERATE, ident, 0, 1), body))
    assert raw.poll(int(PATIENCE * 1000))
    secure.write("bob", "hand", "chief")
    secure.reload()
    until(lambda: handshake.succeeded() or handshake.refusal, "the new handshake is refused")
    heard = []
    while raw.poll(200):
        heard.append(frames.decode(raw.recv_multipart()))
    handshake.succeeded()
    assert handshake.failures == 1, "libzmq tries no more"
    assert {frame.kind for frame in heard} <= {kinds.ACCEPTED, kinds.DELTA, kinds.ERROR}
    ends = [frame for frame in heard if frame.kind == kinds.ERROR]
    assert [(end.header.id, end.body["code"]) for end in ends] in ([], [(ident, "unauthorized")])
    handshake.close()
    raw.close(linger=0)


@pytest.mark.usefixtures("all_keys_after")
def test_frames_of_a_revoked_key_are_dropped_on_an_open_connection(
    secure: SecurePool, bystander: Bystander
) -> None:
    """Frames that arrived before the disconnect and are read after it are dropped as well."""
    raw = peer(secure, "alice", "front")
    raw.send_multipart(frames.encode(Header(kinds.PING)))
    assert raw.poll(int(PATIENCE * 1000))
    accepted = secure.ask("stats")["requests"]["accepted"]
    secure.write("bob", "hand", "chief")
    words = 'event="key revoked" key=alice'
    before = secure.log().count(words)
    secure.ask("reload")
    until(lambda: secure.log().count(words) > before, "the key is revoked")
    for _ in range(50):
        say(raw, generate("late"))
    assert not [r for r in secure.ask("requests")["requests"] if r["owner"] == "key:alice"]
    raw.close(linger=0)
    assert secure.ask("stats")["requests"]["accepted"] <= accepted + 50


def test_a_client_cannot_take_over_the_identity_of_a_connection(
    secure: SecurePool, bystander: Bystander
) -> None:
    """A peer may choose any routing id, but not another owner."""
    for name in ("alice", "bob"):
        ident = name.encode().ljust(16, b"-")
        until(partial(served_as, secure, name, ident), f"{name} is served by that name")
        secure.cli("cancel", ident.hex())


def served_as(secure: SecurePool, name: str, ident: bytes) -> bool:
    """Returns whether a request with the key `name` is served.

    All these requests have one routing id: libzmq drops a connection whose routing id is still in
    use.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTING_ID, b"shared name")
        own = secure.keys.pairs[name]
        socket.setsockopt(zmq.CURVE_SERVERKEY, secure.server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        socket.connect(secure.endpoint("front"))
        body = {"model": "counting", "prompt": name, "options": {"max_tokens": 10**6}}
        socket.send_multipart(frames.encode(Header(kinds.GENERATE, ident), body))
        if not socket.poll(2000):
            return False
        rows = {r["id"]: r["owner"] for r in secure.ask("requests")["requests"]}
        assert rows[ident.hex()] == f"key:{name}"
        return True


@pytest.mark.parametrize("name", ["alice", "chief"])
def test_only_a_workers_key_opens_the_back(
    secure: SecurePool, bystander: Bystander, name: str
) -> None:
    raw = peer(secure, name, "back")
    raw.send_multipart(frames.encode(Header(kinds.HELLO), {"slot": "", "model": "counting"}))
    assert not raw.poll(300)
    raw.close(linger=0)
    assert len([w for w in secure.ask("ps")["workers"] if w["state"] != "none"]) == 1


def test_a_worker_cannot_take_the_slot_of_a_local_one(
    secure: SecurePool, bystander: Bystander
) -> None:
    """A worker with a valid key is refused a local slot, which needs the broker's token."""
    raw = peer(secure, "hand", "back")
    epoch = secure.worker("counting/0")["epoch"]
    for body in ({"slot": "counting/0"}, {"slot": "counting/0", "token": "guess"}):
        raw.send_multipart(frames.encode(Header(kinds.HELLO), {**body, "model": "counting"}))
        raw.send_multipart(frames.encode(Header(kinds.DELTAS, None, epoch), {"rows": []}))
    got: list[str] = []
    # The broker refuses each `hello` and answers the deltas with `who`; it never sends `welcome`.
    while raw.poll(int(PATIENCE * 1000) if len(got) < 4 else 200):
        answer = frames.decode(raw.recv_multipart(), max_body=frames.MAX_BACK_BODY)
        got.append(answer.kind)
        if answer.kind == kinds.STOP:
            assert answer.body["error"]["code"] == "unauthorized"
    assert got == [kinds.STOP, kinds.WHO] * 2
    raw.close(linger=0)
    assert secure.worker("counting/0")["epoch"] == epoch


def test_a_worker_that_forges_rows_affects_only_itself(
    secure: SecurePool, bystander: Bystander
) -> None:
    """Rows of requests that were not dispatched to the forging worker are dropped."""
    raw = peer(secure, "hand", "back")
    hello = {"slot": "", "model": "other", "pid": 1, "digest": "x", "context": 100}
    raw.send_multipart(frames.encode(Header(kinds.HELLO), hello))
    assert raw.poll(int(PATIENCE * 1000))
    welcome = frames.decode(raw.recv_multipart(), max_body=frames.MAX_BACK_BODY)
    assert welcome.kind == kinds.WELCOME
    victim = bystander.stream.id
    row = deltas.Delta(victim, 1, len(bystander.ids), "lie", token_ids.pack_ids([1]))
    message = deltas.Deltas([row])
    body, (blob,) = message.body(), message.blobs()
    raw.send_multipart(
        frames.encode(Header(kinds.DELTAS, None, welcome.header.epoch), body, (blob,))
    )
    raw.send_multipart([b"\xc1", b"garbage"])
    bystander.check_unaffected()
    raw.close(linger=0)
    until(lambda: not secure.worker("other/0").get("pid"), "its connection is gone")


@pytest.mark.parametrize("name", ["alice", "hand"])
def test_only_an_operators_key_opens_the_admin_socket(
    secure: SecurePool, bystander: Bystander, name: str
) -> None:
    done = secure.cli("unload", "counting", *secure.flags(name, "admin"))
    assert done.returncode == 1
    assert f"refuses the key '{name}'" in done.stderr
    assert secure.endpoint("admin") in done.stderr


def test_admin_commands_on_the_front_are_refused(secure: SecurePool, bystander: Bystander) -> None:
    raw = peer(secure, "alice", "front")
    raw.send_multipart(frames.encode(Header("stop", bytes(16))))
    assert raw.poll(int(PATIENCE * 1000))
    answer = frames.decode(raw.recv_multipart())
    assert (answer.kind, answer.body["code"]) == (kinds.ERROR, "bad_request")
    assert "'stop' is an operator's command" in answer.body["message"]
    assert "--run-dir" in answer.body["message"] and "--admin" in answer.body["message"]
    raw.close(linger=0)


def test_requests_of_other_owners_cannot_be_cancelled(
    secure: SecurePool, bystander: Bystander
) -> None:
    with secure.dial("alice") as client:
        assert client.cancel(bystander.stream.id)["state"] == "unknown"


def test_an_oversized_frame_is_refused_before_it_is_read(
    secure: SecurePool, bystander: Bystander
) -> None:
    with secure.dial("alice") as client, pytest.raises(PoolError) as raised:
        client.generate("counting", tokens=[1] * (2 * frames.MAX_BLOB), max_tokens=1)
    assert raised.value.code == "too_large"
    raw = peer(secure, "alice", "front")
    raw.send_multipart([*generate("x")[:1], b"\x90" * (frames.MAX_BODY + 1)])
    assert raw.poll(int(PATIENCE * 1000))
    assert frames.decode(raw.recv_multipart()).body["code"] == "too_large"
    raw.close(linger=0)


def test_a_port_scanner_and_a_silent_peer_delay_nobody(
    secure: SecurePool, bystander: Bystander
) -> None:
    import socket

    host, _, port = secure.endpoint("front").removeprefix("tcp://").rpartition(":")
    callers = [socket.create_connection((host, int(port))) for _ in range(20)]
    for number, caller in enumerate(callers):
        if number % 2:
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
    bystander.check_unaffected()
    with secure.dial("alice") as client:
        assert len(client.generate("counting", "hello", max_tokens=3).ids) == 3
    for caller in callers:
        caller.close()
