"""A server on the loopback that receives posts; tests write its answers byte by byte."""

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
    """Runs a server; yields its port and the bytes of the requests, which `serve` answers."""
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
                except (OSError, EOFError):  # for example by a broker that is killed in a transfer
                    continue

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1], requests
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)


def read_request(connection: socket.socket) -> bytes:
    """Returns a request with its body. Raises EOFError if the sender disconnects before the end."""
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
    """Returns the next bytes, at least one. Raises EOFError at the end of the connection."""
    data = connection.recv(65536)
    if not data:
        raise EOFError("the sender has closed the connection")
    return data


def answering(answer: bytes) -> Serve:
    return lambda connection, request: connection.sendall(answer)
