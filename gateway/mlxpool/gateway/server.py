"""Runs the gateway: uvicorn around the application, on a socket that is bound here."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from mlxpool.gateway.app import Gateway
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

BACKLOG = 1024  # connections that wait to be taken
LAST_WORDS = 5  # seconds for streams under way when the process is told to end
SWITCH = 0.0005  # seconds; the thread that reads the pool must not wait 5 ms for the loop's


def listen(settings: Settings) -> socket.socket:
    """The bound socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Only where the protocol is named does asyncio send small pieces at once: else 40 ms are lost.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, settings.port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        where = f"{settings.host}:{settings.port}"
        words = f"cannot listen on {where}: {error.strerror}; take another --host or --port"
        raise OSError(error.errno, words) from error
    return bound


def server(gateway: Gateway) -> uvicorn.Server:
    """A server of this application, without signals or logs of its own."""
    config = uvicorn.Config(
        gateway.app,
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=LAST_WORDS,
        server_header=False,
    )
    return uvicorn.Server(config)


def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; SIGHUP reads the keys again. `ready` is told the URL.

    Raises ValueError for keys that cannot be used, OSError for an address that cannot be had.
    """
    gateway = Gateway(settings)
    bound = listen(settings)
    sys.setswitchinterval(SWITCH)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is done
    signal.signal(signal.SIGHUP, lambda *_: gateway.keys.reread())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    host, port = bound.getsockname()[:2]
    ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    with bound:
        server(gateway).run([bound])
