"""Access control over HTTP: changes of the pool need the operators' token and this page's origin.

The server keeps neither sessions nor cookies, so a request is judged by its headers alone:

- Host must be a loopback address. A page whose name resolves to such an address (DNS rebinding)
  sends its own name. Reads are checked too, unless the server listens on an open address;
- Origin must be that host: scripts of other sites (CSRF) send the origin of their page;
- Authorization must be the token, which no browser adds by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.files import open_regular
from mlxpool.common.http_access import foreign_page

MIN_TOKEN, MAX_TOKEN = 32, 256  # characters
TOKEN = re.compile(r"[!-~]+")  # the visible ASCII characters, which a header can contain
SETTING = "pool.metrics_admin_token"


class Refusal(Struct, frozen=True):
    """The reason for refusing a request, and the status of the answer."""

    status: HTTPStatus
    why: str


def read_token(file: Path) -> bytes:
    """Returns the digest of the token in a file. Raises ConfigError if the file has no token."""
    try:
        with open_regular(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            text = opened.read(MAX_TOKEN + 2).decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(f"{SETTING}: cannot read {file}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(
            f"{SETTING}: {file} can be read by others (mode {mode:04o}): chmod 600 it, and write"
            " another token if somebody may have seen it"
        )
    if not MIN_TOKEN <= len(text) <= MAX_TOKEN or not TOKEN.fullmatch(text):
        raise ConfigError(
            f"{SETTING}: {file} must have one token of {MIN_TOKEN} to {MAX_TOKEN} visible ASCII"
            f" characters, it has {len(text)}; make one with `openssl rand -hex 32`"
        )
    return _digest(text)


def host_refusal(host: str) -> Refusal | None:
    """Returns the refusal of a Host header; None if it names the loopback interface."""
    if is_loopback(_name(f"//{host}")):
        return None
    return Refusal(
        HTTPStatus.FORBIDDEN,
        f"the host {host!r:.80} is not this machine's loopback address: open the page as"
        " http://127.0.0.1:PORT, from elsewhere through ssh -L",
    )


def page_refusal(method: str, headers: Message) -> Refusal | None:
    """Returns the refusal of a request from a page of another origin; None for other requests."""
    headers_of = {
        name: list(map(str, headers.get_all(name, ()))) for name in ("Origin", "Sec-Fetch-Site")
    }
    page = foreign_page(method, str(headers.get("Host", "")), *headers_of.values())
    return None if page is None else Refusal(HTTPStatus.FORBIDDEN, f"{page} may change nothing")


def refusal(headers: Message, token: bytes) -> Refusal | None:
    """Returns the refusal of a request with these headers; None if it may change the pool."""
    host, origin, authorization = (
        str(headers.get(name, "")) for name in ("Host", "Origin", "Authorization")
    )
    if refused := host_refusal(host):
        return refused
    if origin.lower() != f"http://{host}".lower():
        return Refusal(HTTPStatus.FORBIDDEN, f"the origin {origin!r:.80} is not http://{host}")
    if refused := page_refusal("POST", headers):
        return refused
    if len(headers.get_all("Authorization", ())) > 1:
        return Refusal(HTTPStatus.UNAUTHORIZED, "the header Authorization is there more than once")
    scheme, _, sent = authorization.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(sent.strip()), token):
        return Refusal(HTTPStatus.UNAUTHORIZED, "the operators' token is missing or wrong")
    return None


def is_loopback(host: str) -> bool:
    """Returns whether a host is an address of the loopback interface, or localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(url: str) -> str:
    """Returns the host of a URL without its port; "" for a URL without a host."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
