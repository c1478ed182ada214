"""The relay that simulates a bad network for other tests, and a client that connects through it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from mlxpool.client import Client
from mlxpool.client.connection import Connection
from mlxpool.common.errors import BrokerLost
from mlxpool.common.transport.handshake import HOPELESS_FAILURES
from support import kinds
from support.fake_broker import NO_RESEND_PACE, PATIENCE, FakeBroker, fake_broker
from support.pool import reconnects, until
from support.relay import Relay


@pytest.fixture
def echo() -> Iterator[tuple[str, str, int]]:
    """A server that sends everything back."""
    server = socket.create_server(("127.0.0.1", 0))
    threads = []

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:
                pass  # cut

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    yield ("tcp", "127.0.0.1", server.getsockname()[1])
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    for thread in [acceptor, *threads]:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture
def relay(echo: tuple[str, str, int]) -> Iterator[Relay]:
    with Relay(echo) as made:
        yield made


def dial(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE)


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, f"the connection ended after {data!r:.40}"
        data += more
    return data


def test_it_forwards_everything(relay: Relay) -> None:
    data = bytes(range(256)) * 1000
    with dial(relay) as one, dial(relay) as two:
        for connection in (one, two):
            sender = threading.Thread(target=connection.sendall, args=(data,))
            sender.start()
            assert read(connection, len(data)) == data
            sender.join(PATIENCE)
        assert relay.accepted == relay.connections == 2
    until(lambda: relay.connections == 0, "both are gone")


@pytest.mark.parametrize("how", ["delay", "drip"])
def test_a_slow_relay_loses_nothing(relay: Relay, how: str) -> None:
    if how == "delay":
        relay.delay(0.05)
    else:
        relay.drip(2000)
    with dial(relay) as connection:
        connection.sendall(b"x" * 300)
        assert read(connection, 300) == b"x" * 300


def test_both_sides_notice_a_cut(relay: Relay) -> None:
    with dial(relay) as connection:
        connection.sendall(b"a")
        read(connection, 1)
        relay.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with dial(relay) as connection:
        connection.sendall(b"b")
        assert read(connection, 1) == b"b"


def test_a_freeze_is_not_reported_to_either_side(relay: Relay) -> None:
    with dial(relay) as connection:
        connection.sendall(b"a")
        read(connection, 1)
        relay.freeze()
        connection.sendall(b"b")
        with dial(relay) as late:  # the kernel accepts the connection, the relay does not
            connection.settimeout(0.2)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            assert relay.accepted == 1
            relay.thaw()
            connection.settimeout(PATIENCE)
            assert read(connection, 1) == b"b"
            late.sendall(b"c")
            assert read(late, 1) == b"c"


def test_a_cut_during_a_freeze(relay: Relay) -> None:
    with dial(relay) as connection:
        connection.sendall(b"a")
        read(connection, 1)
        relay.freeze()
        relay.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_refusing_relay(relay: Relay) -> None:
    relay.refuse(True)
    with pytest.raises(ConnectionResetError), dial(relay) as connection:
        connection.recv(1)
    relay.refuse(False)
    with dial(relay) as connection:
        connection.sendall(b"a")
        assert read(connection, 1) == b"a"


def test_a_relay_without_a_server() -> None:
    with Relay(("ipc", "/nowhere/at/all")) as relay:
        with pytest.raises(ConnectionResetError), dial(relay) as connection:
            connection.recv(1)
        relay.close()


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_stream_behind_a_bad_network(fault: str) -> None:
    with fake_broker() as broker, Relay(("ipc", f"{broker.run_dir}/front.ipc")) as relay:
        survive(broker.open(), relay, fault)


def survive(broker: FakeBroker, relay: Relay, fault: str) -> None:
    pace = replace(NO_RESEND_PACE, silence=2.0) if fault == "freeze" else NO_RESEND_PACE
    with Client(endpoint=relay.endpoint, pace=pace, connect_timeout=PATIENCE) as client:
        stream = client.stream("m", "a")
        request = broker.accept()
        broker.tokens(request, 0, 2)
        iterator = iter(stream)
        next(iterator)
        if fault == "cut":
            relay.cut()
            broker.number += 1  # the broker's number for the new connection
        else:
            relay.freeze()
            until(lambda: reconnects(client), "the client has a new connection")
            relay.thaw()
        again = broker.receive(kinds.GENERATE)
        assert again.body["resume"]["count"] == 2
        broker.accepted(request)
        broker.tokens(request, 2)
        broker.done(request, 3)
        assert [delta.ids for delta in iterator] == [(2,)]
        assert stream.result.ids == (0, 1, 2)


def test_a_broker_that_starts_behind_a_proxy_is_waited_for() -> None:
    """A proxy accepts and hangs up meanwhile: that is no refusal of a client without keys."""
    with (
        fake_broker() as broker,
        Relay(("ipc", f"{broker.run_dir}/front.ipc")) as relay,
        Client(endpoint=relay.endpoint, pace=NO_RESEND_PACE, connect_timeout=PATIENCE) as client,
    ):
        stream = client.stream("m", "a")
        until(lambda: failures(client) > HOPELESS_FAILURES, "its connections are closed")
        broker.open()
        request = broker.accept()
        broker.tokens(request, 0, 2)
        broker.done(request, 2)
        assert stream.read().ids == (0, 1)


def failures(client: Client) -> int:
    """How many handshakes of a client have failed in a row."""
    connection = client._connection
    assert isinstance(connection, Connection)
    return connection._dealer.handshake.failures


def test_a_proxy_without_a_broker_is_told_as_such() -> None:
    """A busy machine may not come to a connection's end within one second: the next try does."""
    with (
        Relay(("ipc", "/nowhere/at/all")) as relay,
        Client(endpoint=relay.endpoint, pace=NO_RESEND_PACE, connect_timeout=1) as client,
    ):

        def refused() -> str:
            with pytest.raises(BrokerLost) as caught:
                client.generate("m", "a")
            return str(caught.value)

        until(
            lambda: "closed again before the handshake ends; start one" in refused(),
            "the client says that connections are closed",
        )
