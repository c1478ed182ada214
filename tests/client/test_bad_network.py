"""A client that connects through a bad network, which a relay simulates."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlxpool.client import Client
from mlxpool.common.errors import BrokerLost
from mlxpool.common.transport.handshake import HOPELESS_FAILURES
from support import kinds
from support.fake_broker import NO_RESEND_PACE, PATIENCE, FakeBroker, fake_broker
from support.pool import connection_of, reconnects, until
from support.relay import Relay


@pytest.mark.parametrize("fault", ["cut", "freeze"])
def test_a_stream_behind_a_bad_network(fault: str) -> None:
    with fake_broker() as broker, Relay(("ipc", f"{broker.run_dir}/front.ipc")) as relay:
        survive(broker.open(), relay, fault)


def survive(broker: FakeBroker, relay: Relay, fault: str) -> None:
    pace = replace(NO_RESEND_PACE, silence=2.0) if fault == "freeze" else NO_RESEND_PACE
    with Client(endpoint=relay.endpoint, pace=pace, connect_timeout=PATIENCE) as client:
        stream, request = broker.stream_of(client)
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
    """A client without keys waits for the broker, although a proxy closes its connections."""
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
    """Returns the number of handshakes of a client that have failed in a row."""
    return connection_of(client)._dealer.handshake.failures


def test_a_proxy_without_a_broker_is_told_as_such() -> None:
    # The request is repeated, because on a busy machine the proxy may take over 1 s to close a
    # connection.
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
