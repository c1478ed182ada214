"""A server on the loopback that receives posts, whose answers a test writes byte by byte."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.pool import PATIENCE

OK = b"HTTP/1.1 204 No Content\r\n\r\n"
Serve = Callable[[socket.socket, bytes], None]


@contextmanager
def receiver(
    serve: Serve, context: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """A server on the loopback; `serve` answers each whole request, whose bytes are collected."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                try:
                    with (
                        context.wrap_socket(accepted, server_side=True)
                        if context
                        else accepted as c
                    ):
                        request = read_request(c)
                        requests.append(request)
                        serve(c, request)
                except (OSError, EOFError):  # such as a broker that is killed in the middle
                    continue

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1], requests
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


def read_request(connection: socket.socket) -> bytes:
    """The head and the body of a request. Raises EOFError if its sender leaves before its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    while len(body) < length:
        body += received(connection)
    return head + b"\r\n\r\n" + body


def received(connection: socket.socket) -> bytes:
    """What has arrived next, at least one byte. Raises EOFError at the end of the connection."""
    data = connection.recv(65536)
    if not data:
        raise EOFError("the sender has closed the connection")
    return data


def answering(answer: bytes) -> Serve:
    return lambda connection, request: connection.sendall(answer)
