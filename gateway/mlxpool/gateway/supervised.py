"""Runs the gateway's application as a child of the broker, on the broker's listening sockets.

SIGTERM drains it, SIGINT ends its answers, SIGHUP reads the keys again. When the broker
dies the gateway gives the address up, so that the next broker can have it, and ends after its last
answer: streams go on as soon as the next broker serves the run directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from mlxpool.common.config.schema import GatewayConfig
from mlxpool.common.transport import listening
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.server import THREAD_SWITCH_INTERVAL, DrainingServer, server_config
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

STDIN = 0
UNUSABLE = 2  # exit code


class SupervisedServer(DrainingServer):
    """A server that the process at the other end of `notify_fd` supervises."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, notify_fd: int, beat_interval: float
    ) -> None:
        """`beat_interval`: seconds between two bytes."""
        super().__init__(config, gateway)
        self._notify_fd = notify_fd
        self._beat_interval = beat_interval
        self._beating: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and say so."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(STDIN, self._on_stdin)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Write a byte now and after each interval; a loop that hangs writes none."""
        os.set_blocking(self._notify_fd, False)
        while True:
            try:
                os.write(self._notify_fd, b".")
            except OSError:  # the broker is slow to read, or has ended
                pass
            await asyncio.sleep(self._beat_interval)

    def _on_stdin(self) -> None:
        """The end of stdin is the broker's."""
        if os.read(STDIN, 4096):
            return
        asyncio.get_running_loop().remove_reader(STDIN)
        log.warning("the broker has ended: answers go on if another follows")
        self.config.timeout_graceful_shutdown = None  # their own limits bound them
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM drains; SIGINT, as a second signal, ends what runs."""
        super().handle_exit(signal.SIGTERM, frame)
        if sig == signal.SIGINT:
            super().handle_exit(signal.SIGTERM, frame)


def settings_of(config: GatewayConfig) -> Settings:
    """Raises ValueError for a value out of bounds."""
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


def run(config: GatewayConfig) -> int:
    """Serve until the broker ends it, or has ended. Returns the exit code.

    A setting or a file of keys that cannot be used is logged, and the code is UNUSABLE.
    """
    try:
        gateway = Gateway(settings_of(config))
    except ValueError as error:
        log.error("the gateway cannot start: %s", error)
        return UNUSABLE
    signal.signal(signal.SIGHUP, lambda *_: gateway.reload_keys())
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = SupervisedServer(
        server_config(gateway), gateway, config.notify_fd, config.beat_interval
    )
    with contextlib.ExitStack() as stack:
        server.run([stack.enter_context(listening.inherited(one)) for one in config.listen_fds])
    return 0
