"""Who may ask over HTTP; and who may change the pool: an operator with the token, on this page.

The server has no sessions and no cookies, so a request is judged by its headers alone:

- Host is a loopback address: a page whose name resolves to it (DNS rebinding) sends its own name.
  This holds for what is only read as well, unless the server listens on an open address;
- Origin is that host: scripts of other sites (CSRF) send the origin of their page;
- Authorization is the token, which no browser adds by itself.
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
TOKEN = re.compile(r"[!-~]+")  # visible ASCII: what a header can carry
SETTING = "pool.metrics_admin_token"


class Refusal(Struct, frozen=True):
    """Why a request may not change the pool, and the status that says so."""

    status: HTTPStatus
    why: str


def read_token(file: Path) -> bytes:
    """The digest of the token in a file. Raises ConfigError naming the file, never the token."""
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
    """Why a request with this Host header is refused; None: it names the loopback interface."""
    if is_loopback(_name(f"//{host}")):
        return None
    return Refusal(
        HTTPStatus.FORBIDDEN,
        f"the host {host!r:.80} is not this machine's loopback address: open the page as"
        " http://127.0.0.1:PORT, from elsewhere through ssh -L",
    )


def page_refusal(method: str, headers: Message) -> Refusal | None:
    """Why a request is refused that a page of another origin sent; None: none did."""
    told = {
        name: list(map(str, headers.get_all(name, ()))) for name in ("Origin", "Sec-Fetch-Site")
    }
    found = foreign_page(method, str(headers.get("Host", "")), *told.values())
    return None if found is None else Refusal(HTTPStatus.FORBIDDEN, f"{found} may change nothing")


def refusal(headers: Message, token: bytes) -> Refusal | None:
    """Why a request with these headers is refused; None: it may change the pool."""
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
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), token):
        return Refusal(HTTPStatus.UNAUTHORIZED, "the operators' token is missing or wrong")
    return None


def is_loopback(host: str) -> bool:
    """Whether a host is an address of the loopback interface, or localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(url: str) -> str:
    """The host of a URL without its port; "" if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
