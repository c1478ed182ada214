"""Sockets that listen for HTTP."""

from __future__ import annotations

import socket

BACKLOG = 1024  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A bound and listening socket. Port 0: any that is free. Raises OSError."""
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


def inherited(descriptor: int) -> socket.socket:
    """The listening socket that the parent process passed on; owns the descriptor."""
    with_any_protocol = socket.socket(fileno=descriptor)
    family = with_any_protocol.family
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, with_any_protocol.detach())


def url_of(bound: socket.socket) -> str:
    """The URL of a listening socket, with the port that it has."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
