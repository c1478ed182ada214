"""Addresses of names, looked up on threads: the system's call for it can neither wait nor be ended.

A look-up that hangs keeps its thread, which is a daemon: the process ends without it. Each name has
one at most, so that there are never more threads than the settings allow hosts.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence

from mlxpool.common.web_targets import IpAddress

Resolve = Callable[[str, int], Sequence[IpAddress]]
Found = tuple[Sequence[IpAddress], OSError | None]


def resolve(host: str, port: int) -> list[IpAddress]:
    """The addresses of a name, in the order in which the system prefers them. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that DNS cannot have
        raise OSError(f"{host} cannot be looked up: {error}") from None
    addresses = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return list(dict.fromkeys(addresses))


class Names:
    """Looks names up for the tasks of one event loop."""

    def __init__(self, resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._pending: dict[tuple[str, int], asyncio.Future[Found]] = {}

    async def addresses(self, host: str, port: int) -> Sequence[IpAddress]:
        """The addresses of a name. Raises OSError.

        A task that is cancelled leaves the look-up to those that ask for the same name.
        """
        key = (host, port)
        pending = self._pending.get(key)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = self._pending[key] = loop.create_future()
            pending.add_done_callback(lambda done: self._pending.pop(key, None))
            threading.Thread(
                target=self._look_up,
                args=(loop, pending, host, port),
                name=f"notices-name-{host}"[:60],
                daemon=True,
            ).start()
        addresses, error = await asyncio.shield(pending)
        if error is not None:
            raise error
        return addresses

    def _look_up(
        self, loop: asyncio.AbstractEventLoop, pending: asyncio.Future[Found], host: str, port: int
    ) -> None:
        found: Found
        try:
            found = (self._resolve(host, port), None)
        except OSError as error:
            found = ((), error)
        except Exception as bug:  # a bug of ours must not keep the name for ever
            found = ((), OSError(f"{host} could not be looked up: {bug!r:.200}"))
        try:
            loop.call_soon_threadsafe(_settle, pending, found)
        except RuntimeError:
            pass  # the loop has ended


def _settle(pending: asyncio.Future[Found], found: Found) -> None:
    if not pending.done():
        pending.set_result(found)
