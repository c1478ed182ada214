"""Sends one request to a broker's admin socket, on a new connection."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from typing import Any

import zmq

from mlxpool.common.errors import Unauthorized, from_body
from mlxpool.common.protocol import frames, to_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets
from mlxpool.common.transport.handshake import Handshake
from mlxpool.common.transport.keys import Credentials


def ask(
    endpoint: str,
    credentials: Credentials | None,
    kind: str,
    body: Mapping[str, Any],
    ident: bytes | None = None,
    timeout: float = 2.0,
) -> dict[str, Any] | None:
    """Sends one message, and returns the body of the answer.

    Returns None if no answer comes within `timeout` seconds. Raises Unauthorized if the handshake
    fails, for example for a refused key. Raises the error in the broker's answer.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = sockets.dealer(context, endpoint, credentials)
    handshake = Handshake(socket, endpoint, credentials)
    try:
        header = Header(kind, ident or os.urandom(frames.ID_BYTES))
        socket.send_multipart(frames.encode(header, body))
        if not _wait_for_answer(socket, handshake, timeout):
            if handshake.trouble:
                raise Unauthorized(handshake.trouble)
            return None
        message = frames.decode(socket.recv_multipart(), max_body=frames.MAX_FRAME)
    finally:
        handshake.close()
        socket.close(linger=0)
        context.term()
    if message.kind == to_client.Failed.kind:
        raise from_body(message.body)
    return message.body


def _wait_for_answer(socket: zmq.Socket[bytes], handshake: Handshake, timeout: float) -> bool:
    """Returns whether an answer came in `timeout` seconds; False also if the handshake fails."""
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
