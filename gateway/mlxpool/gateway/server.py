"""Runs the gateway's application in uvicorn, on a socket that this module binds."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from mlxpool.common.transport import listening
from mlxpool.gateway.app import Gateway
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

SHUTDOWN_TIMEOUT = 5  # seconds for streams in flight after SIGTERM
# Seconds. With the default of 5 ms the thread that reads the pool waits for the loop's thread.
THREAD_SWITCH_INTERVAL = 0.0005


def listen(settings: Settings) -> socket.socket:
    """A bound and listening socket. Raises OSError naming the address."""
    try:
        return listening.listen(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        words = f"cannot listen on {where}: {error.strerror}; take another --host or --port"
        raise OSError(error.errno, words) from error


def server_config(gateway: Gateway, shutdown_timeout: float) -> uvicorn.Config:
    """How uvicorn serves this application: without access log or log configuration.

    `shutdown_timeout`: seconds for answers in flight after SIGTERM.
    """
    return uvicorn.Config(
        gateway.app,
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=shutdown_timeout,  # type: ignore[arg-type]
        server_header=False,
    )


def make_server(gateway: Gateway) -> uvicorn.Server:
    """A uvicorn server of this application."""
    return uvicorn.Server(server_config(gateway, SHUTDOWN_TIMEOUT))


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again. `ready` is called with the URL.

    Raises ValueError for keys that cannot be used, OSError for an address that cannot be bound.
    """
    gateway = Gateway(settings)
    bound = listen(settings)
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again after its shutdown
    signal.signal(signal.SIGHUP, lambda *_: gateway.keys.reload())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    ready(listening.url_of(bound))
    with bound:
        make_server(gateway).run([bound])
