"""The answers of the ZAP handler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85

from mlxpool.broker.security.access import ZapHandler
from mlxpool.broker.security.keyring import Keyring
from mlxpool.common.config.schema import KeyConfig
from mlxpool.common.transport import keys
from support.pool import PATIENCE

ALICE = keys.make("alice", "client").public
RAW = z85.decode(ALICE)


@pytest.fixture
def refused() -> list[int]:
    return []


@pytest.fixture
def zap(refused: list[int]) -> Iterator[ZapHandler]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ring = Keyring({"alice": KeyConfig("client", ALICE)})
    handler = ZapHandler(context, ring, lambda: refused.append(1))
    yield handler
    handler.close()
    context.term()


def request(domain: bytes, mechanism: bytes, *credentials: bytes) -> list[bytes]:
    address = b"localhost:7:8:9" if mechanism == b"NULL" else b"10.0.0.1"
    return [b"1.0", b"1", domain, address, b"", mechanism, *credentials]


@pytest.mark.parametrize(
    ("domain", "mechanism", "credentials", "user"),
    [
        (b"client", b"CURVE", [RAW], f"key:{ALICE}"),
        (b"worker", b"CURVE", [RAW], ""),
        (b"admin", b"CURVE", [RAW], ""),
        (b"", b"CURVE", [RAW], ""),
        (b"client", b"CURVE", [bytes(32)], ""),
        (b"client", b"PLAIN", [b"alice", b"password"], ""),
        (b"client", b"GSSAPI", [b"alice"], ""),
        (b"client", b"NULL", [], "uid:7"),
    ],
    ids=["client", "worker", "admin", "nowhere", "stranger", "password", "ticket", "ipc"],
)
def test_a_key_is_admitted_in_its_role_alone(
    zap: ZapHandler,
    refused: list[int],
    domain: bytes,
    mechanism: bytes,
    credentials: list[bytes],
    user: str,
) -> None:
    assert zap.user_id(request(domain, mechanism, *credentials), 1.0) == user
    assert len(refused) == (not user)


def test_another_version_is_refused(zap: ZapHandler) -> None:
    assert zap.user_id([b"2.0", *request(b"client", b"CURVE", RAW)[1:]], 1.0) == ""


def test_it_answers_over_its_socket_and_goes_on_after_nonsense(zap: ZapHandler) -> None:
    asker: zmq.Socket[bytes] = zap.socket.context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    for sent, status in (
        (request(b"client", b"CURVE", RAW), b"200"),
        ([b"1.0"], b"400"),
        ([b"x", b"y", b"z"], b"400"),
        (request(b"client", b"CURVE", bytes(32)), b"400"),
    ):
        asker.send_multipart(sent)
        assert zap.socket.poll(int(PATIENCE * 1000))
        zap.serve(1.0)
        assert asker.poll(int(PATIENCE * 1000))
        assert asker.recv_multipart()[2] == status
    zap.serve(1.0)  # `serve` does not wait for a request
    asker.close(linger=0)


def test_a_flood_of_refusals_is_one_line_a_second(
    zap: ZapHandler, caplog: pytest.LogCaptureFixture
) -> None:
    for tenth in range(25):
        zap.user_id(request(b"client", b"CURVE", bytes(32)), 1 + tenth / 10)
    lines = [r for r in caplog.records if "refused" in r.message]
    assert len(lines) == 3
    assert [line.__dict__["untold"] for line in lines] == [0, 9, 9]
