"""Runs the gateway's application in uvicorn: for `mlxpool gateway`, or as a broker's own process.

A broker passes the sockets to its own gateway and supervises it. Bytes on a pipe are the heartbeat
of the gateway's loop. The end of standard input means that the broker has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from mlxpool.common.config.schema import GatewayConfig
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

STDIN = 0
UNUSABLE = 2  # exit code
SHUTDOWN_TIMEOUT = 5  # seconds that uvicorn waits for connections when no request runs
# Seconds. With the default of 5 ms the thread that reads the pool waits for the loop's thread.
THREAD_SWITCH_INTERVAL = 0.0005


def listen(settings: Settings) -> list[socket.socket]:
    """Returns bound and listening sockets, at least one. Raises OSError naming the address."""
    try:
        return listening.listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        words = f"cannot listen on {where}: {error.strerror}; take another --host or --port"
        raise OSError(error.errno, words) from error


class DrainingServer(uvicorn.Server):
    """Drains the gateway at the first SIGTERM or Ctrl-C, and ends immediately at the second."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self.interrupted = False  # ended by Ctrl-C
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finishing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(listening.BACKLOG)  # replaces asyncio's backlog, ACCEPTED_AT_ONCE

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: passes the work to the event loop."""
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
    """Returns uvicorn's configuration for this application: no access log, no log configuration."""
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
    """Returns a server of this application."""
    return DrainingServer(server_config(gateway), gateway)


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C; SIGHUP reads the keys again. `ready` is called with the URL.

    Raises ValueError for keys that cannot be used, OSError for an address that cannot be bound, and
    KeyboardInterrupt after Ctrl-C.
    """
    gateway = Gateway(settings)
    bound = listen(settings)
    _set_up_process(gateway)
    ready(listening.url_of(bound[0]))
    server = make_server(gateway)
    _serve(server, bound)
    if server.interrupted:
        raise KeyboardInterrupt


def _set_up_process(gateway: Gateway) -> None:
    signal.signal(signal.SIGHUP, lambda *_: gateway.reload_keys())
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _serve(server: uvicorn.Server, bound: Sequence[socket.socket]) -> None:
    with contextlib.ExitStack() as stack:
        server.run([stack.enter_context(listener) for listener in bound])


# ---- a gateway that a broker supervises ----------------------------------------------------------


class SupervisedServer(DrainingServer):
    """A server that the process at the other end of `notify_fd` supervises."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, notify_fd: int, beat_interval: float
    ) -> None:
        """`beat_interval`: seconds between two heartbeats, each a byte written to `notify_fd`."""
        super().__init__(config, gateway)
        self._notify_fd = notify_fd
        self._beat_interval = beat_interval
        self._beating: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts serving, and begins the heartbeat."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(STDIN, self._on_stdin)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Writes a byte now and after each interval; a loop that hangs writes no byte."""
        os.set_blocking(self._notify_fd, False)
        while True:
            try:
                os.write(self._notify_fd, b".")
            except OSError:  # the broker is slow to read, or has ended
                pass
            await asyncio.sleep(self._beat_interval)

    def _on_stdin(self) -> None:
        """Handles the end of standard input: the broker has ended."""
        if os.read(STDIN, 4096):
            return
        asyncio.get_running_loop().remove_reader(STDIN)
        log.warning("the broker has ended: answers go on if another follows")
        self.config.timeout_graceful_shutdown = None  # running requests have their own limits
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal: SIGTERM drains; SIGINT, or a second signal, ends running requests."""
        super().handle_exit(signal.SIGTERM, frame)
        if sig == signal.SIGINT:
            super().handle_exit(signal.SIGTERM, frame)


def settings_of(config: GatewayConfig) -> Settings:
    """Returns the settings. Raises ValueError for a value out of bounds."""
    return Settings(
        run_dir=Path(config.run_dir),
        host=config.host,
        port=config.port,
        keys=Path(config.keys) if config.keys else None,
        per_key=config.per_key or None,
        max_body=config.max_body,
        idle_time=config.idle_time,
        stream_keep=config.stream_keep,
        drain_timeout=config.drain_timeout,
        cors_origins=tuple(config.cors_origins),
        trusted_proxies=tuple(config.trusted_proxies),
        access_log=config.access_log,
    )


def run_supervised(config: GatewayConfig) -> int:
    """Serves until the broker stops this process or the broker ends. Returns the exit code.

    Unusable settings or keys are logged, and the code is UNUSABLE.
    """
    try:
        gateway = Gateway(settings_of(config))
    except ValueError as error:
        log.error("the gateway cannot start: %s", error)
        return UNUSABLE
    _set_up_process(gateway)
    server = SupervisedServer(
        server_config(gateway), gateway, config.notify_fd, config.beat_interval
    )
    _serve(server, [listening.inherited(fd) for fd in config.listen_fds])
    return 0
