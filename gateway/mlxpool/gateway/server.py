"""Runs the gateway's application in uvicorn, on sockets that this module binds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from mlxpool.common.transport import listening
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.operations.connections import (
    ACCEPTED_AT_ONCE,
    AcceptErrors,
    Connections,
    is_news,
    own_connection_limit,
    protocol_of,
)
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

SHUTDOWN_TIMEOUT = 5  # seconds that uvicorn waits for connections when nothing runs any more
# Seconds. With the default of 5 ms the thread that reads the pool waits for the loop's thread.
THREAD_SWITCH_INTERVAL = 0.0005


def listen(settings: Settings) -> list[socket.socket]:
    """Bound and listening sockets, at least one. Raises OSError naming the address."""
    try:
        return listening.listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        words = f"cannot listen on {where}: {error.strerror}; take another --host or --port"
        raise OSError(error.errno, words) from error


class DrainingServer(uvicorn.Server):
    """Drains the gateway at the first SIGTERM or Ctrl-C, and ends at once at the second."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self.interrupted = False  # by Ctrl-C
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finishing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(listening.BACKLOG)  # asyncio made it ACCEPTED_AT_ONCE

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of signals; the loop does the work."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._finish())
        else:
            self._gateway.drain.hurry()

    async def _finish(self) -> None:
        try:
            await self._gateway.finish()
        finally:
            self.should_exit = True


def server_config(gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves this application: without access log or log configuration."""
    settings = gateway.settings
    connections = Connections(
        settings.max_connections or own_connection_limit(),
        settings.header_time,
        gateway.surroundings.unparsable,
    )
    logging.getLogger("uvicorn.error").addFilter(is_news)
    return uvicorn.Config(
        gateway.app,
        http=protocol_of(connections),
        ws="none",
        lifespan="on",
        backlog=ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        timeout_keep_alive=settings.idle_time,  # type: ignore[arg-type]  # it may be a float
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[*settings.trusted_proxies],
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        server_header=False,
    )


def make_server(gateway: Gateway) -> DrainingServer:
    """A server of this application."""
    return DrainingServer(server_config(gateway), gateway)


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again. `ready` is called with the URL.

    Raises ValueError for keys that cannot be used, OSError for an address that cannot be bound, and
    KeyboardInterrupt after Ctrl-C.
    """
    gateway = Gateway(settings)
    bound = listen(settings)
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL)
    signal.signal(signal.SIGHUP, lambda *_: gateway.reload_keys())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    ready(listening.url_of(bound[0]))
    server = make_server(gateway)
    with contextlib.ExitStack() as stack:
        server.run([stack.enter_context(each) for each in bound])
    if server.interrupted:
        raise KeyboardInterrupt
