"""One question to the broker's admin socket and its answer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from mlxpool.cli.reach import no_answer
from mlxpool.cli.target import Target
from mlxpool.common.errors import BrokerLost, Unauthorized, from_body
from mlxpool.common.protocol import frames, to_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake

ANSWER_TIMEOUT = 2.0  # seconds
RELOAD_TIMEOUT = 30.0  # seconds; settings and models folders are read before the answer


def ask(
    where: Path | Target,
    kind: str,
    body: Mapping[str, Any] | None = None,
    ident: bytes | None = None,
    *,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Send one admin message; returns the body of the answer.

    `where` is the run directory of a local broker, or a target. Raises BrokerLost naming the
    endpoint without an answer in time, which a broker that is starting may still give, Unauthorized
    naming a key that the broker refuses, and the error that the broker answers with.
    """
    target = Target(where) if isinstance(where, Path) else where
    endpoint, credentials = target.endpoint_of("admin"), target.credentials()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.dealer(context, endpoint, credentials)
    handshake = Handshake(socket, endpoint, credentials)
    try:
        socket.send_multipart(
            frames.encode(Header(kind, ident or os.urandom(frames.ID_BYTES)), body or {})
        )
        if not _wait_for_answer(socket, handshake, timeout):
            if handshake.trouble:
                raise Unauthorized(handshake.trouble)
            raise BrokerLost(no_answer(target.run_dir, endpoint))
        message = frames.decode(socket.recv_multipart(), max_body=frames.MAX_FRAME)
    finally:
        handshake.close()
        socket.close(linger=0)
        context.term()
    if message.kind == to_client.Failed.kind:
        raise from_body(message.body)
    return message.body


def reload(target: Target) -> dict[str, Any]:
    """Have the broker read its settings again; returns what has changed. Raises as `ask` does."""
    ask(target, "stats")  # says within ANSWER_TIMEOUT that a broker is frozen
    return ask(target, "reload", timeout=RELOAD_TIMEOUT)


def _wait_for_answer(socket: zmq.Socket[bytes], handshake: Handshake, timeout: float) -> bool:
    """Whether a message came in `timeout` seconds, and before the handshake was hopeless."""
    poller = zmq.Poller()
    for source in (socket, handshake.monitor):
        poller.register(source, zmq.POLLIN)
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0 and not handshake.hopeless:
        ready = dict(poller.poll(math.ceil(left * 1000)))
        if socket in ready:
            return True
        handshake.succeeded()
    return False
