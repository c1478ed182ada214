"""Handshakes that fail: final refusals, and failures after which the client tries again."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from chaos.raw_zmtp import GREETING, PATIENCE, ready
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import HOPELESS_FAILURES, Handshake
from mlxpool.common.transport.keys import Credentials, KeyPair

BROKEN_OFF = HOPELESS_FAILURES + 2
ANSWER = GREETING + ready("ROUTER")  # the greeting of a broker without keys
SECURE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")
MILLISECONDS = int(PATIENCE * 1000)


@pytest.fixture(params=["ipc", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A listening socket of each transport."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        if request.param == "ipc":
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(Path(folder) / "a.ipc"))
        else:
            server = socket.create_server(("127.0.0.1", 0))
        server.listen()
        server.settimeout(PATIENCE)
        with server:
            yield server


def endpoint_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    return f"ipc://{name}" if isinstance(name, str) else f"tcp://{name[0]}:{name[1]}"


@contextlib.contextmanager
def dialled(endpoint: str, credentials: Credentials | None = None) -> Iterator[Handshake]:
    """The handshake of a DEALER that reconnects immediately after each lost connection.

    It gives up no connection because of its age, so only the listener ends connections.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialler = context.socket(zmq.DEALER)
    dialler.reconnect_ivl = 1
    dialler.handshake_ivl = 0  # no limit
    if credentials is not None:
        dialler.curve_serverkey = credentials.server.encode()
        dialler.curve_publickey = credentials.own.public.encode()
        dialler.curve_secretkey = credentials.own.secret.encode()
    handshake = Handshake(dialler, endpoint, credentials)
    dialler.connect(endpoint)
    try:
        yield handshake
    finally:
        handshake.close()
        context.destroy(linger=0)


def follow(handshake: Handshake, until: Callable[[], bool]) -> bool:
    """Reads the monitor until `until()` is true. Returns whether a handshake succeeded before."""
    while not until():
        assert handshake.monitor.poll(MILLISECONDS), "the handshake reports nothing more"
        if handshake.succeeded():
            return True
    return False


@contextlib.contextmanager
def answering(listener: socket.socket, answers: list[bytes]) -> Iterator[None]:
    """Accepts one connection for each answer, and sends the answer.

    Each connection is closed after its answer. Only the last stays open inside the context.
    """
    leave = threading.Event()

    def serve() -> None:
        for number, answer in enumerate(answers, start=1):
            try:
                peer, _ = listener.accept()
            except OSError:  # the listener was shut down
                return
            with peer, contextlib.suppress(OSError):
                if number % 2:  # even connections are reset, as their input was not read
                    peer.recv(10)
                peer.sendall(answer)
                if number == len(answers):
                    leave.wait(PATIENCE)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def credentials() -> Credentials:
    return Credentials(
        KeyPair("server", "client", *keys()).public, KeyPair("me", "client", *keys())
    )


def keys() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def test_a_handshake_cut_at_any_byte_is_no_refusal(listener: socket.socket) -> None:
    """A greeting that is cut off is no refusal, because the next greeting may be complete."""
    cuts = [ANSWER[:size] for size in range(len(ANSWER))]
    cuts += [SECURE_GREETING[:size] for size in range(len(GREETING))]
    with answering(listener, [*cuts, ANSWER]), dialled(endpoint_of(listener)) as handshake:
        assert follow(handshake, lambda: handshake.hopeless or bool(handshake.trouble))
        assert not handshake.failures


def test_a_whole_greeting_tells_that_keys_are_wanted(listener: socket.socket) -> None:
    cuts = [SECURE_GREETING[:-1]] * BROKEN_OFF
    with answering(listener, [*cuts, SECURE_GREETING]), dialled(endpoint_of(listener)) as handshake:
        assert not follow(handshake, lambda: handshake.hopeless)
        assert "takes no connection without a key" in handshake.refusal
        assert handshake.failures == len(cuts) + 1


@pytest.mark.parametrize("secure", [True, False])
def test_a_broker_and_a_client_of_which_one_has_keys(secure: bool) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    key = KeyPair("server", "server", *keys()) if secure else None
    endpoint = sockets.bind(router, "tcp://127.0.0.1:*", key)
    with dialled(endpoint, None if secure else credentials()) as handshake:
        assert not follow(handshake, lambda: bool(handshake.refusal))
        wanted = "takes no connection without a key" if secure else "does not answer to the server"
        assert wanted in handshake.refusal
    context.destroy(linger=0)


def test_connections_closed_in_a_row_make_keys_doubtful(listener: socket.socket) -> None:
    """With tcp, connections that close in a row may mean a wrong server key; ipc has no keys.

    The next connection stays open, so no further failure follows.
    """
    if listener.family == socket.AF_UNIX:
        pytest.skip("keys are for tcp")
    with (
        answering(listener, [SECURE_GREETING] * (HOPELESS_FAILURES + 1)),
        dialled(endpoint_of(listener), credentials()) as handshake,
    ):
        assert not follow(handshake, lambda: handshake.hopeless)
        assert handshake.failures == HOPELESS_FAILURES and not handshake.refusal
        assert "does not answer to the server key" in handshake.trouble
