"""The allowed forms of URLs to which the broker posts notices of ended jobs (webhooks). Pure.

A URL must have a form that every program reads alike. These are refused: a host in decimal or octal
numbers, which resolvers and people read as different addresses; a user before the host; and unusual
characters.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

MAX_URL = 2048  # characters
PORTS = {"https": 443, "http": 80}
_FORM = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[!-~]*)?"
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Parsed = TypeVar("Parsed")


class Origin(Struct, frozen=True):
    """Scheme, host and port. `host` is a name in lower case, or an address without brackets."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def address(self) -> IpAddress | None:
        """The address if the host is an address; None if it is a name."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None


class Target(Struct, frozen=True):
    """A webhook's URL, to which a notice is posted. `path` starts with / and includes the query."""

    origin: Origin
    path: str

    @classmethod
    def parse(cls, url: str) -> Target:
        """Returns the target of a URL. Raises ValueError naming the fault of the URL."""
        if len(url) > MAX_URL:
            raise ValueError(f"the URL has {len(url)} characters, at most {MAX_URL}")
        match = _FORM.fullmatch(url)
        if match is None:
            raise ValueError(
                "the URL must be http(s)://HOST[:PORT]/PATH in visible ASCII, without user or"
                " password"
            )
        path = match["path"] or "/"
        if "#" in path or "\\" in path:
            raise ValueError("the URL must have no fragment and no backslash")
        port = int(match["port"] or PORTS[match["scheme"]])
        if not 1 <= port <= 65535:
            raise ValueError(f"the port must be 1 to 65535, got {port}")
        return cls(Origin(match["scheme"], _host(match["host"]), port), path)


def _host(text: str) -> str:
    """Returns a host in a normal form for comparisons. Raises ValueError if it is not a host."""
    if text.startswith("["):
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            raise ValueError(f"{text} is not an IPv6 address") from None
    host = text.lower()
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):  # resolvers read such a host as an IPv4 address
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(
                f"{text} is not an IPv4 address: write it as four decimal numbers"
            ) from None
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{text!r:.80} is not the name of a host")
    return host


def parse_origin(text: str) -> Origin:
    """Returns the origin of a text such as https://hooks.example.org or http://127.0.0.1:8080.

    Raises ValueError if the text has another form.
    """
    target = Target.parse(text)
    if target.path != "/" or text.endswith("/"):
        raise ValueError("the URL must be http(s)://HOST[:PORT] and nothing after it")
    return target.origin


class Allowed(Struct, frozen=True):
    """The allowed webhooks: URLs of these origins whose address is public or in `networks`."""

    origins: frozenset[Origin] = frozenset()
    networks: tuple[IpNetwork, ...] = ()

    @classmethod
    def of(cls, origins: Sequence[str], networks: Sequence[str]) -> Allowed:
        """Returns the targets that settings allow. Raises ValueError naming the faulty value."""
        return cls(
            frozenset(_named(parse_origin, text) for text in origins),
            tuple(_named(ipaddress.ip_network, text) for text in networks),
        )

    def refusal(self, target: Target) -> str:
        """Returns why nothing may be posted to a URL; "" if it is allowed."""
        if target.origin in self.origins:
            return ""
        return f"{target.origin} is not one of job_notify_hosts"

    def address_refusal(self, origin: Origin, address: IpAddress) -> str:
        """Returns why nothing may be posted to this address of an origin; "" if it is allowed."""
        if address == origin.address or any(address in network for network in self.networks):
            return ""
        if is_public(address):
            return ""
        return f"{origin.host} is {address}, which is not public and not in job_notify_networks"


def _named(parse: Callable[[str], Parsed], text: str) -> Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.100}: {error}") from None


_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: IpAddress) -> bool:
    """Returns whether an address is public: not loopback, link-local, multicast or private.

    An IPv6 address that encodes an IPv4 address counts as this IPv4 address.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    inner = address.ipv4_mapped or address.sixtofour
    if inner is None and address in _NAT64:
        inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if inner is not None:
        return is_public(inner)
    return address in _GLOBAL_V6 and address.is_global and address.teredo is None
