"""Sockets that listen for HTTP, and reserved ports for sockets of other programs."""

from __future__ import annotations

import errno
import socket

BACKLOG = 1024  # the most connections that wait to be accepted
LOCALHOST = "localhost"
FREE_PORTS = 16  # attempts to find a free port


def listen(host: str, port: int) -> list[socket.socket]:
    """Returns bound and listening sockets, at least one, all with the same port. Raises OSError.

    Port 0 is any free port. For `localhost` both loopback addresses are bound if the machine has
    IPv6, because some clients try only one of them.
    """
    if host != LOCALHOST:
        return [_listen(host, port)]
    for _ in range(FREE_PORTS):
        first = _listen("127.0.0.1", port)
        try:
            return [first, _listen("::1", first.getsockname()[1])]
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # there is no IPv6
                return [first]
            first.close()
            if port:
                raise
    raise OSError(errno.EADDRINUSE, "no port is free on both loopback addresses")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on a socket that was made with IPPROTO_TCP. Without TCP_NODELAY
    # small writes take 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound


def reserve(host: str) -> socket.socket:
    """Returns a socket that is bound to a free port of an IPv4 address, and does not listen.

    Until this socket is closed, the kernel does not assign the port to a socket that binds port 0,
    and refuses it to sockets without SO_REUSEADDR. Under Linux a socket with SO_REUSEADDR can
    listen on the port. Raises OSError if the address cannot be bound.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, 0))
    except OSError:
        bound.close()
        raise
    return bound


def inherited(descriptor: int) -> socket.socket:
    """Returns the listening socket of an inherited descriptor. The socket owns the descriptor."""
    with_any_protocol = socket.socket(fileno=descriptor)
    family = with_any_protocol.family
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, with_any_protocol.detach())


def url_of(bound: socket.socket) -> str:
    """Returns the URL of a listening socket, with its port."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
