"""What a client of docs/protocol.md has to live through, played by a fake broker."""

from __future__ import annotations

from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.token_ids import pack_ids
from support.fake_broker import FACTS, FakeBroker


def lose_everything_once(broker: FakeBroker) -> None:
    """Broker, connection, frame, patience, and all signs of life. A slow machine loses more."""
    request = broker.accept()
    broker.tokens(request, 0, 2, facts=FACTS)
    broker.boot += 1
    goes_on(broker, request, 2)
    broker.number += 1
    goes_on(broker, request, 3)
    broker.tokens(request, 9)
    goes_on(broker, request, 4)
    broker.error(request, "draining", retry_after_ms=10)
    goes_on(broker, request, 5)
    before = broker.peer
    while broker.peer == before:
        broker.receive(kinds.GENERATE, pongs=False)
    broker.accepted(request)
    broker.done(request, 6)


def goes_on(broker: FakeBroker, request: bytes, have: int) -> None:
    """It is sent again with so many ids and gets one more."""
    while (again := broker.receive(kinds.GENERATE)).body["resume"]["count"] != have:
        pass
    assert again.header.id == request and again.body["prompt"] == "hello"
    assert again.body["resume"]["facts"] == FACTS and again.body["resume"]["seed"] == 1
    assert again.blobs == (pack_ids(range(have)),)
    broker.accepted(request)
    broker.tokens(request, have)
