"""One POST to a URL that the settings allow, at an address that was checked.

The name is resolved once, and the connection goes to an address of that answer: a name that means
another host a moment later (DNS rebinding) changes nothing. No redirect is followed, no proxy and
no cookie is used, and of the response only the status and the headers are read.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic

from mlxpool.common.web_targets import Allowed, IpAddress, Origin, Target

TIMEOUT = 15.0  # seconds for one try, from the name to the status
MAX_RETRY_AFTER = 3600.0  # seconds
USER_AGENT = "mlxpool"

Resolve = Callable[[str, int], Sequence[IpAddress]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a try. `why` says it in a few words if it failed.

    `final`: no other try can help. `retry_after`: seconds that the server asked for, or 0.
    """

    delivered: bool
    why: str = ""
    final: bool = False
    retry_after: float = 0.0


def resolve(host: str, port: int) -> list[IpAddress]:
    """The addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = (ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found)
    return list(dict.fromkeys(addresses))


class Poster:
    """Used by any thread. `timeout` is for a whole try, in seconds."""

    def __init__(self, timeout: float = TIMEOUT, resolve: Resolve = resolve) -> None:
        self._timeout = timeout
        self._resolve = resolve
        self._tls = ssl.create_default_context()

    def post(self, url: str, body: bytes, headers: Mapping[str, str], allowed: Allowed) -> Outcome:
        """Post once; never raises for what is wrong with the URL or the other side."""
        until = monotonic() + self._timeout
        try:
            target = Target.parse(url)
        except ValueError as error:
            return Outcome(False, f"the URL cannot be used: {error}", final=True)
        if refused := allowed.refusal(target):
            return Outcome(False, refused)
        try:
            address = self._address(target.origin, allowed)
            return self._exchange(target, address, body, headers, until)
        except _NotAllowed as error:
            return Outcome(False, str(error))
        except (OSError, HTTPException, UnicodeError) as error:
            if monotonic() >= until:
                return Outcome(False, f"no answer in {self._timeout:g} s")
            return Outcome(False, f"{type(error).__name__}: {error}"[:300])

    def _address(self, origin: Origin, allowed: Allowed) -> IpAddress:
        """An address of the host that may be used. Raises OSError, _NotAllowed.

        One that may not be used refuses the host with all others: its name is not in the hands of
        whom the settings trust.
        """
        literal = origin.address
        found = [literal] if literal is not None else self._resolve(origin.host, origin.port)
        for address in found:
            if refused := allowed.address_refusal(origin, address):
                raise _NotAllowed(refused)
        if not found:
            raise OSError(f"{origin.host} has no address")
        return found[0]

    def _exchange(
        self,
        target: Target,
        address: IpAddress,
        body: bytes,
        headers: Mapping[str, str],
        until: float,
    ) -> Outcome:
        origin = target.origin
        connection = _Pinned(origin, address, max(0.001, until - monotonic()), self._tls)
        # A time-out of a socket is for one call: a server that sends a byte now and then would be
        # waited for without end.
        ending = threading.Timer(max(0.001, until - monotonic()), connection.end)
        ending.daemon = True
        ending.start()
        try:
            fields = {"User-Agent": USER_AGENT, "Content-Type": "application/json", **headers}
            connection.request("POST", target.path, body, {**fields, "Connection": "close"})
            return _outcome(connection.getresponse())
        finally:
            ending.cancel()
            connection.close()


class _NotAllowed(Exception):
    """The host has an address to which nothing may be posted."""


class _Pinned(HTTPConnection):
    """A connection to one address, which the certificate of the host's name has to vouch for."""

    def __init__(
        self, origin: Origin, address: IpAddress, timeout: float, tls: ssl.SSLContext
    ) -> None:
        super().__init__(origin.host, origin.port, timeout=timeout)
        self.default_port = 443 if origin.scheme == "https" else 80  # for the header Host
        self._origin, self._address, self._tls = origin, address, tls
        self._ended = False

    def connect(self) -> None:
        plain = socket.create_connection((str(self._address), self.port), self.timeout)
        self.sock = plain
        if self._origin.scheme == "https":
            self.sock = self._tls.wrap_socket(plain, server_hostname=self._origin.host)
        if self._ended:
            self.end()

    def end(self) -> None:
        """Have everything that waits on the socket end; from another thread."""
        self._ended = True
        try:
            if self.sock is not None:
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            pass


def _outcome(response: HTTPResponse) -> Outcome:
    status = response.status
    if 200 <= status < 300:
        return Outcome(True)
    if 300 <= status < 400:
        return Outcome(False, f"HTTP {status}: redirects are not followed")
    if status == 410:
        return Outcome(False, "HTTP 410: the receiver wants no notices any more", final=True)
    wait = str(response.getheader("Retry-After", ""))
    seconds = float(wait) if wait.isascii() and wait.isdecimal() and len(wait) < 10 else 0.0
    return Outcome(False, f"HTTP {status}", retry_after=min(MAX_RETRY_AFTER, seconds))
