"""Makes every ZeroMQ socket: high-water marks, linger, reconnects, limits on sizes.

No socket uses ZeroMQ's heartbeats: libzmq aborts the process if it sends a heartbeat to a peer that
left while its input was full (libzmq#4364). The protocol has its own heartbeats. No socket has a
routing id: the ROUTER names connections, and with CURVE the handshake names the owner. IMMEDIATE
stays 0: with 1, final messages of streams that a client has not read are lost when a broker exits.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import zmq

from mlxpool.common.protocol.frames import MAX_FRAME
from mlxpool.common.transport.keys import Credentials, KeyPair

HIGH_WATER = 1000  # the most queued messages for each peer; 0 would mean no bound
LINGER_MS = 2000  # finite, so that a process ends; above 0, so that last messages are sent
KEEPALIVE = {  # times in seconds; CNT is a number of probes
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
BACKLOG = 100  # the most connections that may wait to be accepted
RECONNECT_MS = (50, 250)  # the first and the longest delay before a reconnect
HANDSHAKE_MS = 5000  # the longest time that a silent peer holds a descriptor
MAX_PATH = 107  # the most bytes of a Unix socket's path


def router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    *,
    backlog: int = BACKLOG,
    domain: str = "",
) -> zmq.Socket[bytes]:
    """Returns a bound ROUTER that reports unknown and full peers, and drops nothing silently.

    On tcp the kernel closes connections to hosts that vanished (keepalive). Up to `backlog` new
    connections wait in the kernel, for example while the process is suspended. With a `domain` the
    context's ZAP handler, which has to run already, decides about every connection. Raises OSError
    naming the endpoint if it cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    _common(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.BACKLOG, backlog)
    for option, value in KEEPALIVE.items():
        socket.setsockopt(option, value)
    if domain:
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        bind(socket, endpoint)
    except OSError:
        socket.close(linger=0)
        raise
    return socket


def bind(socket: zmq.Socket[bytes], endpoint: str, key: KeyPair | None = None) -> str:
    """Binds one more endpoint to a socket; with a `key`, tcp uses CURVE.

    Returns the endpoint with its port. Raises OSError naming the endpoint.
    """
    before = os.umask(0o077)  # only the broker's user can open the socket files
    secure = key is not None and endpoint.startswith("tcp:")
    # libzmq copies a socket's options at each bind: one ROUTER can have plain and secure endpoints.
    socket.setsockopt(zmq.CURVE_SERVER, int(secure))
    if secure and key is not None:
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        cure = "; another process has it: give another port" * (error.errno == errno.EADDRINUSE)
        raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}{cure}") from None
    finally:
        os.umask(before)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, credentials: Credentials | None = None
) -> zmq.Socket[bytes]:
    """Returns a connecting DEALER that reconnects until the broker refuses its key.

    Raises OSError if the endpoint is malformed.
    """
    socket = context.socket(zmq.DEALER)
    _common(socket)
    for option, value in KEEPALIVE.items():
        socket.setsockopt(option, value)
    if credentials is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, credentials.server.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, credentials.own.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, credentials.own.secret.encode())
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise OSError(error.errno, f"cannot connect to {endpoint}: {error.strerror}") from None
    return socket


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)  # above the legal size, see MAX_FRAME


def ipc(run_dir: Path, name: str) -> str:
    """Returns the endpoint of a socket in the run directory. Raises ValueError for a long path."""
    path = run_dir / f"{name}.ipc"
    size = len(os.fsencode(path))
    if size > MAX_PATH:
        raise ValueError(
            f"the socket path {path} has {size} bytes, at most {MAX_PATH}; use a shorter --run-dir"
        )
    return f"ipc://{path}"
