"""Sockets that listen for HTTP, and ports that are kept for sockets of other programs."""

from __future__ import annotations

import errno
import socket

BACKLOG = 1024  # connections that wait to be accepted
LOCALHOST = "localhost"
FREE_PORTS = 16  # that are tried


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound and listening sockets, at least one, all with the same port. Raises OSError.

    Port 0: any that is free. `localhost` is both loopback addresses where the machine has IPv6:
    clients differ in which of them they try.
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
    # asyncio sets TCP_NODELAY only if the protocol is named; without it small pieces take 40 ms.
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
    """A socket that is bound to a free port of an IPv4 address and does not listen. Raises OSError.

    Until it is closed the kernel gives the port to no socket that asks for any port, neither to
    listen nor to connect, and refuses it to sockets without SO_REUSEADDR. One with that option can
    listen there: under Linux a bound socket with the option is in the way of a socket without it
    alone.
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
    """The listening socket that the parent process passed on; owns the descriptor."""
    with_any_protocol = socket.socket(fileno=descriptor)
    family = with_any_protocol.family
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, with_any_protocol.detach())


def url_of(bound: socket.socket) -> str:
    """The URL of a listening socket, with the port that it has."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
