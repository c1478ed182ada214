"""Hostile peers: the broker's memory stays bounded, and other peers are served."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from chaos.harness import LIMITS, Chaos, model
from chaos.raw_zmtp import GREETING, LONG, MORE, RawZmtp, frame, message, ready
from mlxpool.broker.transport.peers import MAX_SKIPPED_PARTS
from mlxpool.common.protocol import deltas, frames, token_ids
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from support import kinds
from support.bystander import UNHURRIED
from support.free_ports import free_port
from support.pool import PATIENCE, until
from support.relay import Relay

Patch = pytest.MonkeyPatch

MB = 1024 * 1024
SHORT_GRACE = LIMITS + "client_grace = 2\n"
UNKNOWN_ID = bytes(frames.ID_BYTES)


class Target(Chaos):
    """A pool under attack."""

    def __enter__(self) -> Target:
        super().__enter__()
        return self

    @property
    def front(self) -> str:
        return sockets.ipc(self.pool.run_dir, "front")

    @property
    def broker(self) -> psutil.Process:
        assert self.pool.process is not None
        return psutil.Process(self.pool.process.pid)

    def resident(self) -> int:
        return int(self.broker.memory_info().rss)

    def bad_frames(self) -> int:
        return int(self.pool.ask("stats")["frames"]["bad"])

    def assert_answers(self, endpoint: str) -> None:
        """Asserts that a well-behaved peer is served."""
        with RawZmtp(endpoint) as peer:
            peer.greet().say(Header(kinds.PING))
            assert peer.receive().kind == kinds.PONG


@pytest.fixture
def target(tmp_path: Path, monkeypatch: Patch) -> Iterator[Target]:
    """A pool for this test alone: no other test changes its memory and counters."""
    with Target(tmp_path, monkeypatch, model(), SHORT_GRACE) as opened:
        yield opened


@pytest.fixture(scope="module")
def tcp() -> str:
    """The tcp endpoint at which clients reach the shared pool."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tcp: str) -> Iterator[Target]:
    """One pool that successive tests attack."""
    with (
        Patch.context() as patch,
        Target(
            tmp_path_factory.mktemp("shared"), patch, model(), f'{SHORT_GRACE}front = ["{tcp}"]\n'
        ) as opened,
    ):
        yield opened


@pytest.fixture(params=["ipc", "tcp"])
def front_endpoint(request: pytest.FixtureRequest, shared: Target, tcp: str) -> tuple[Target, str]:
    """The shared pool and one of its two front endpoints."""
    return shared, shared.front if request.param == "ipc" else tcp


# ---- invalid handshakes --------------------------------------------------------------------------

INVALID_HANDSHAKES = {
    "nothing": b"",
    "half a greeting": GREETING[:30],
    "a greeting alone": GREETING,
    "half a handshake": GREETING + ready("DEALER")[:9],
    "another version": b"\xff" + bytes(8) + b"\x7f" + b"\x09\x09" + bytes(52),
    "zeros": bytes(4096),
    "noise": bytes(n * 73 % 256 for n in range(4096)),
    "a message for a handshake": GREETING + message([b"x", b"y"]),
    "a publisher": GREETING + ready("PUB"),
    "a subscriber": GREETING + ready("SUB"),
    "a pusher": GREETING + ready("PUSH"),
    "an unknown socket": GREETING + ready("X" * 200),
    "a name larger than a frame may be": GREETING + ready("DEALER", bytes(frames.MAX_FRAME)),
}


def test_an_invalid_handshake_is_disconnected(front_endpoint: tuple[Target, str]) -> None:
    target, endpoint = front_endpoint
    target.start(100, 2)
    peers = {name: RawZmtp(endpoint) for name in INVALID_HANDSHAKES}
    for name, peer in peers.items():
        peer.send(INVALID_HANDSHAKES[name])
    for name, peer in peers.items():
        with peer:
            assert peer.is_cut(), f"{name}: still connected"
    target.assert_answers(endpoint)
    target.assert_all_done()


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_peer_cannot_take_over_an_identity(front_endpoint: tuple[Target, str], size: int) -> None:
    """A second peer with the identity of a connected peer is ignored; the first is served."""
    target, endpoint = front_endpoint
    with RawZmtp(endpoint) as first, RawZmtp(endpoint) as second:
        for peer in (first, second):
            peer.greet("DEALER", b"A" * size)
        first.say(Header(kinds.PING))
        assert first.receive().kind == kinds.PONG
        second.say(Header(kinds.PING))
        first.say(Header(kinds.MODELS, bytes([1] * 16)))
        assert first.receive().kind == kinds.MODELS
    target.assert_answers(endpoint)
    target.start(20)
    target.assert_all_done()


def test_another_protocol_has_no_effect(front_endpoint: tuple[Target, str]) -> None:
    """libzmq takes the HTTP requests for ZMTP 1.0, and the broker sees an idle connection."""
    target, endpoint = front_endpoint
    with RawZmtp(endpoint) as peer:
        peer.send(b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n" * 1000)
        target.start(50, 2)
        target.assert_all_done()
        target.assert_answers(endpoint)


def test_a_req_socket_is_told_that_its_delimiter_is_wrong(shared: Target) -> None:
    with RawZmtp(shared.front) as peer:
        peer.greet("REQ").send(message([b"", *frames.encode(Header(kinds.PING))]))
        answer = peer.receive()
    assert (answer.kind, answer.body["code"]) == (kinds.ERROR, "bad_request")


# ---- unfinished and oversized messages ---------------------------------------------------------

UNFINISHED = {
    "large parts": frame(bytes(frames.MAX_FRAME - 64), MORE),
    "empty parts": frame(b"", MORE) * 200_000,
}
# The sum of the memory guard's limit, the data that arrive at 4 GB/s until the guard's next check,
# and the broker's own memory. Without the guard the broker would grow without bound.
MAX_RESIDENT = 2048 * MB


@pytest.mark.parametrize("name", UNFINISHED)
def test_the_sender_of_an_unfinished_message_is_disconnected(target: Target, name: str) -> None:
    patient = target.new_client(pace=UNHURRIED)
    streams = target.start(1500, 2, client=patient)
    target.reach(streams, 10)
    with RawZmtp(target.front) as peer:
        peer.greet()
        sent = 0
        while peer.send(UNFINISHED[name]):
            sent += 1
            assert target.resident() < MAX_RESIDENT, f"the broker still reads after {sent} pieces"
    until(lambda: front_accepts(target), "the front is open")  # the broker frees the parts first
    target.assert_answers(target.front)
    target.assert_all_done(streams)
    assert all(stream.result is not None and stream.result.attempts == 1 for stream in streams)
    patient.close()
    until(lambda: target.resident() < MAX_RESIDENT // 8, "the memory is given back")
    assert target.pool.ask("ps")["broker"]["turned_out"] >= 1


def test_a_peer_that_reconnects_at_once_cannot_fill_the_memory(target: Target) -> None:
    """Four peers, one after the other, send until they are disconnected; the memory stays bounded.

    Other streams may have to resume.
    """
    streams = target.start(1500, 2)
    target.reach(streams, 10)
    cuts = 0
    while cuts < 4:
        with RawZmtp(target.front) as peer:
            peer.greet().say(Header(kinds.PING))
            while peer.send(UNFINISHED["large parts"]):
                assert target.resident() < MAX_RESIDENT
        cuts += 1
        until(lambda: front_accepts(target), "the front is open")
    target.assert_all_done(streams)


def front_accepts(target: Target) -> bool:
    """Whether the front accepts a connection."""
    try:
        with RawZmtp(target.front) as peer:
            peer.greet()
    except (OSError, EOFError, AssertionError):
        return False
    return True


def test_a_message_of_half_a_million_parts(target: Target) -> None:
    target.start(500, 2)
    with RawZmtp(target.front) as peer:
        peer.greet().send(frame(b"", MORE) * 500_000 + frame(b""))
        answer = peer.receive()
        assert f"1 to {frames.MAX_PARTS} parts" in answer.body["message"]
        peer.say(Header(kinds.PING))
        assert peer.receive().kind == kinds.PONG
    target.assert_all_done()
    assert target.resident() < 256 * MB


def test_excess_parts_are_read_in_pieces(tmp_path: Path) -> None:
    """Excess parts of a message are read in pieces, between which the loop serves other peers.

    The test counts the pieces itself, without a broker.
    """
    import zmq

    from mlxpool.broker.transport.peers import Peers

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = sockets.router(context, "tcp://127.0.0.1:*")
    dealer = sockets.dealer(context, router.getsockopt_string(zmq.LAST_ENDPOINT))
    try:
        dealer.send_multipart([b"x"] * (3 * MAX_SKIPPED_PARTS))
        dealer.send_multipart([b"next"])
        peers, got = Peers(router), []
        for calls in itertools.count(1):
            assert router.poll(int(PATIENCE * 1000))
            received = peers.receive(1.0)
            if received is not None:
                got.append((calls, len(received[1])))
            if len(got) == 2:
                break
        (first, parts), (second, next_parts) = got
        assert 3 <= first <= 5 and second == first + 1
        assert (parts, next_parts) == (frames.MAX_PARTS + 1, 1)
    finally:
        dealer.close(linger=0)
        router.close(linger=0)
        context.term()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a part that claims to be endless", bytes([LONG]) + b"\x7f" + b"\xff" * 7),
        ("a part just over the limit", bytes([LONG]) + (frames.MAX_FRAME + 1).to_bytes(8, "big")),
    ],
)
def test_an_invalid_frame_length_is_disconnected(shared: Target, name: str, data: bytes) -> None:
    with RawZmtp(shared.front) as peer:
        peer.greet().send(data)
        assert peer.is_cut(), f"{name}: still connected"
    shared.assert_answers(shared.front)


# ---- floods --------------------------------------------------------------------------------------


def unknown_model() -> bytes:
    header = Header(kinds.GENERATE, os.urandom(16), 0, 1)
    return message(frames.encode(header, {"model": "nobody", "prompt": "x"}))


FLOODS: dict[str, Callable[[], bytes]] = {
    "empty frames": lambda: frame(b"") * 500,
    "pings": lambda: message(frames.encode(Header(kinds.PING))) * 500,
    "unknown models": lambda: unknown_model() * 500,
    "garbage": lambda: message([os.urandom(40), os.urandom(40)]) * 500,
    "cancels": lambda: message(frames.encode(Header(kinds.CANCEL, os.urandom(16)))) * 500,
    "too large": lambda: message(
        [*frames.encode(Header(kinds.PING, UNKNOWN_ID), {}), bytes(5 * MB)]
    ),
}


@contextmanager
def flood(endpoint: str, data: Callable[[], bytes], reads: bool) -> Iterator[RawZmtp]:
    """Inside the context, runs a thread that sends data to an endpoint without end.

    If `reads` is true, a second thread reads the answers.
    """
    stopping = threading.Event()

    def send(peer: RawZmtp) -> None:
        while not stopping.is_set() and peer.send(data()):
            pass

    def read(peer: RawZmtp) -> None:
        while not stopping.is_set() and not peer.is_cut(0.1):
            pass

    with RawZmtp(endpoint) as peer:
        peer.greet()
        threads = [threading.Thread(target=send, args=(peer,))]
        if reads:
            threads.append(threading.Thread(target=read, args=(peer,)))
        for thread in threads:
            thread.start()
        try:
            yield peer
        finally:
            stopping.set()
            peer.hang_up()
            for thread in threads:
                thread.join(PATIENCE)
                assert not thread.is_alive()


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "never reads"])
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_beside_a_stream(shared: Target, name: str, reads: bool) -> None:
    with flood(shared.front, FLOODS[name], reads):
        shared.start(150, 3)
        shared.assert_all_done()
        assert shared.resident() < MAX_RESIDENT
    shared.assert_answers(shared.front)


FILL_AND_DISCONNECT = """\
import sys, time, zmq
from chaos.raw_zmtp import RawZmtp, frame
from mlxpool.common.transport import sockets

context = zmq.Context()
router = sockets.router(context, sys.argv[1])
with RawZmtp(sys.argv[1]) as peer:
    peer.greet().socket.settimeout(1)
    try:
        while True:
            peer.socket.sendall(frame(b"x") * 1000)
    except TimeoutError:
        pass
time.sleep(3)
while router.poll(500):
    router.recv_multipart()
router.close(linger=0)
context.term()
print("alive")
"""


def test_a_peer_that_fills_the_input_and_leaves_does_not_abort_the_process(tmp_path: Path) -> None:
    """libzmq#4364: if the socket sends heartbeats, a peer that fills its input aborts the process.

    The test's socket is in another process, whose main thread does not read for 3 s.
    """
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        done = subprocess.run(
            [sys.executable, "-c", FILL_AND_DISCONNECT, f"ipc://{folder}/front.ipc"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


# ---- many peers ----------------------------------------------------------------------------------

CROWD_SIZE = 1000
LAST_MESSAGES: tuple[Callable[[], bytes], ...] = (
    lambda: message(frames.encode(Header(kinds.PING))),  # a complete message
    lambda: message(frames.encode(Header(kinds.PING)))[:-3],  # in the middle of a frame
    lambda: frame(b"begun", MORE),  # in the middle of a message
    unknown_model,
    lambda: b"",
)


def connect_and_vanish(endpoint: str) -> None:
    crowd = [RawZmtp(endpoint).greet() for _ in range(CROWD_SIZE)]
    for peer, last_message in zip(crowd, itertools.cycle(LAST_MESSAGES), strict=False):
        peer.send(last_message())
    for peer in crowd:
        peer.socket.close()


def test_a_thousand_clients_come_and_vanish(target: Target) -> None:
    """After each of three rounds descriptors, links and memory are freed, and streams go on."""
    streams = target.start(1000, 2)
    target.reach(streams, 10)
    descriptors = target.broker.num_fds()
    after = []
    for _ in range(3):
        connect_and_vanish(target.front)
        until(lambda: target.broker.num_fds() <= descriptors + 2, "their descriptors are free")
        after.append(target.resident())
    assert after[2] - after[0] < 64 * MB, after
    target.assert_all_done(streams)
    until(lambda: target.pool.ask("stats")["links"]["known"] <= 1, "the core has forgotten them")
    until(lambda: target.pool.ask("ps")["broker"]["links"] <= 1, "so has the front")
    assert target.bad_frames() == 0


def test_a_crowd_that_is_reset(tmp_path: Path, monkeypatch: Patch) -> None:
    """If all tcp connections of a crowd are reset at once, descriptors are freed, streams go on."""
    port = free_port()
    limits = f'{SHORT_GRACE}front = ["tcp://127.0.0.1:{port}"]\n'
    with Target(tmp_path, monkeypatch, model(), limits) as target:
        streams = target.start(500, 2)
        target.reach(streams, 10)
        descriptors = target.broker.num_fds()
        with Relay(("tcp", "127.0.0.1", port)) as relay:
            crowd = [RawZmtp(relay.endpoint).greet() for _ in range(200)]
            for peer in crowd:
                peer.send(frame(b"begun", MORE))
            relay.cut()
            for peer in crowd:
                peer.socket.close()
        until(lambda: target.broker.num_fds() <= descriptors + 2, "their descriptors are free")
        target.assert_all_done(streams)


def test_a_forged_worker_has_no_effect(shared: Target) -> None:
    """The forger knows request ids and epochs, but has no token: its frames are rejected."""
    streams = shared.start(400, 2)
    shared.reach(streams, 10)
    epoch = int(shared.pool.worker("m/0")["epoch"])
    before = int(shared.pool.ask("stats")["frames"]["fenced"])
    forged = [
        deltas.Delta(
            stream.ident, 1, stream.had, "forged ", token_ids.pack_ids([1]), end={"reason": "stop"}
        )
        for stream in streams
    ]
    sent = deltas.Deltas(forged)
    body, (blob,) = sent.body(), sent.blobs()
    with RawZmtp(sockets.ipc(shared.pool.run_dir, "back")) as peer:
        peer.greet()
        for kind, what, blobs in (
            (kinds.DELTAS, body, [blob]),
            (kinds.HELLO, {"slot": "m/0", "token": "0" * 32}, []),
            (kinds.BYE, {"error": {"code": "internal"}}, []),
            (kinds.DELTAS, body, [blob]),
        ):
            assert peer.send(message(frames.encode(Header(kind, None, epoch), what, blobs)))
        assert peer.receive().kind == kinds.WHO
    shared.assert_all_done(streams)
    assert shared.pool.ask("stats")["frames"]["fenced"] >= before + 2
