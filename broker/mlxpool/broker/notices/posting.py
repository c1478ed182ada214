"""A POST of a notice to a URL that the settings allow, at an address that was checked.

The name is resolved once, and the connection uses an address from that result. So a later change of
the name's address (DNS rebinding) has no effect. Redirects are not followed; proxies and cookies
are not used. Only the status and the headers of a response are read.

A single deadline bounds look-up, connection, TLS, request and response together.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time

import h11
from msgspec import Struct

from mlxpool.common.web_targets import PORTS, Allowed, IpAddress, Origin, Target

Resolve = Callable[[str, int], Sequence[IpAddress]]
Found = tuple[Sequence[IpAddress], OSError | None]


def resolve(host: str, port: int) -> list[IpAddress]:
    """Returns the addresses of a name, in the system's order of preference.

    Raises OSError if the look-up fails.
    """
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that DNS does not allow
        raise OSError(f"{host} cannot be looked up: {error}") from None
    addresses = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries)
    return list(dict.fromkeys(addresses))


class Names:
    """Looks names up on threads, for the tasks of one event loop.

    The system's call is blocking and cannot be cancelled. A hung look-up keeps its thread, a daemon
    thread that does not delay the end of the process. Each name has at most one thread, so there
    are never more threads than allowed hosts.
    """

    def __init__(self, resolve: Resolve = resolve) -> None:
        self._resolve = resolve
        self._pending: dict[tuple[str, int], asyncio.Future[Found]] = {}

    async def addresses(self, host: str, port: int) -> Sequence[IpAddress]:
        """Returns the addresses of a name. Raises OSError if the look-up fails.

        If a task is cancelled, its look-up continues for other tasks that need the name.
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
        result: Found
        try:
            result = (self._resolve(host, port), None)
        except OSError as error:
            result = ((), error)
        except Exception as bug:  # after a bug the look-up must not stay pending for ever
            result = ((), OSError(f"{host} could not be looked up: {bug!r:.200}"))
        try:
            loop.call_soon_threadsafe(_settle, pending, result)
        except RuntimeError:
            pass  # the loop has ended


def _settle(pending: asyncio.Future[Found], found: Found) -> None:
    if not pending.done():
        pending.set_result(found)


TIMEOUT = 15.0  # seconds of an attempt, from the look-up to the status
MAX_RETRY_AFTER = 3600.0  # seconds
MAX_HEAD = 32 * 1024  # most bytes of the head of a response
MAX_WHY = 300  # most characters of a reason
READ_SIZE = 16 * 1024  # bytes
USER_AGENT = "mlxpool"


class Outcome(Struct, frozen=True):
    """The outcome of an attempt to post. `why` is the reason of a failure in a few words.

    `final`: a further try cannot help. `retry_after`: the server's Retry-After in seconds, or 0.
    `unreachable`: no connection could be made, so no other notice to this origin can be delivered
    now.
    """

    delivered: bool
    why: str = ""
    final: bool = False
    retry_after: float = 0.0
    unreachable: bool = False


class Poster:
    """Posts notices, for the tasks of one event loop. `timeout`: seconds of a whole attempt."""

    def __init__(self, timeout: float = TIMEOUT, names: Names | None = None) -> None:
        self._timeout = timeout
        self._names = names or Names()
        self._tls = ssl.create_default_context()

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], allowed: Allowed
    ) -> Outcome:
        """Posts a notice once. Raises nothing for an invalid URL or a failing server."""
        try:
            target = Target.parse(url)
        except ValueError as error:
            return Outcome(False, f"the URL cannot be used: {error}", final=True)
        if refused := allowed.refusal(target):
            return Outcome(False, refused, unreachable=True)
        connection: Connection | None = None
        try:
            until = asyncio.get_running_loop().time() + self._timeout
            async with asyncio.timeout_at(until):
                connection = await self._connect(target.origin, allowed, until)
                return await connection.exchange(target, body, headers)
        except TimeoutError:
            why = f"no answer in {self._timeout:g} s" if connection else self._too_late(target)
            return Outcome(False, why, unreachable=connection is None)
        except (OSError, h11.ProtocolError) as error:
            name = "" if isinstance(error, NotAllowed) else f"{type(error).__name__}: "
            return Outcome(False, f"{name}{error}"[:MAX_WHY], unreachable=connection is None)
        finally:
            if connection is not None:
                connection.end()

    def _too_late(self, target: Target) -> str:
        return f"no connection to {target.origin} in {self._timeout:g} s"

    async def _connect(self, origin: Origin, allowed: Allowed, until: float) -> Connection:
        """Connects to the first address that accepts. Each address gets a fraction of the time.

        `until` is a time of the loop's clock. Raises the OSError of the last address, or
        NotAllowed.
        """
        addresses = await self._addresses(origin, allowed)
        loop = asyncio.get_running_loop()
        last: OSError = OSError(f"{origin.host} has no address")
        for index, address in enumerate(addresses):
            share = max(0.0, until - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(share):
                    return await self._connect_to(origin, address)
            except TimeoutError:
                last = OSError(f"no connection to {address} in {share:.1f} s")
            except OSError as error:
                last = error
        raise last

    async def _addresses(self, origin: Origin, allowed: Allowed) -> Sequence[IpAddress]:
        """Returns the addresses of the host, if all are allowed. Raises OSError or NotAllowed.

        If a single address is not allowed, the host is refused, because an untrusted party may
        control the host's name.
        """
        literal = origin.address
        if literal is not None:
            addresses: Sequence[IpAddress] = [literal]
        else:
            addresses = await self._names.addresses(origin.host, origin.port)
        for address in addresses:
            if refused := allowed.address_refusal(origin, address):
                raise NotAllowed(refused)
        return addresses

    async def _connect_to(self, origin: Origin, address: IpAddress) -> Connection:
        """Connects to an address of the origin.

        Over TLS the server's certificate must be valid for the host's name. Raises OSError.
        """
        secure = origin.scheme == "https"
        reader, writer = await asyncio.open_connection(
            str(address),
            origin.port,
            limit=MAX_HEAD,
            ssl=self._tls if secure else None,
            server_hostname=origin.host if secure else None,
        )
        return Connection(reader, writer)


class NotAllowed(OSError):
    """Raised if the host has an address that is not allowed."""


class Connection:
    """A connection for a single request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def exchange(self, target: Target, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """Sends the request and reads the head of its response.

        Raises OSError if the connection fails, and ProtocolError for an invalid response.
        """
        fields = {
            "Host": host_field(target.origin),
            "User-Agent": USER_AGENT,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **headers,
        }
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        request = h11.Request(method="POST", target=target.path, headers=list(fields.items()))
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(http.send(event) or b"")
        await self._writer.drain()
        while True:
            received = http.next_event()
            if isinstance(received, h11.Response):
                return outcome_of(received, time())
            if received is h11.NEED_DATA:
                http.receive_data(await self._reader.read(READ_SIZE))
            elif not isinstance(received, h11.InformationalResponse):
                raise h11.RemoteProtocolError(f"there was no response, but {received!r:.60}")

    def end(self) -> None:
        """Closes the connection immediately, even during a transfer."""
        self._writer.transport.abort()


def host_field(origin: Origin) -> str:
    """Returns the header Host, without the port if it is the scheme's default."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    return host if origin.port == PORTS[origin.scheme] else f"{host}:{origin.port}"


def outcome_of(response: h11.Response, now: float) -> Outcome:
    """Returns the outcome of a post from its response. `now`: seconds since 1970."""
    status = response.status_code
    if 200 <= status < 300:
        return Outcome(True)
    if 300 <= status < 400:
        return Outcome(False, f"HTTP {status}: redirects are not followed")
    if status == 410:
        return Outcome(False, "HTTP 410: the receiver wants no notices any more", final=True)
    waits = [value for name, value in response.headers if name == b"retry-after"]
    return Outcome(False, f"HTTP {status}", retry_after=_seconds(waits[0], now) if waits else 0.0)


def _seconds(field: bytes, now: float) -> float:
    """Returns the seconds of a Retry-After, which is a number or a date; 0 for any other text."""
    if field.isdigit():
        return min(MAX_RETRY_AFTER, float(field[:10]))
    try:
        seconds = parsedate_to_datetime(field.decode("ascii")).timestamp() - now
    except (ValueError, OverflowError):
        return 0.0
    return min(MAX_RETRY_AFTER, max(0.0, seconds))
