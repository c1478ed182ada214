"""Access to HTTP servers: bearer keys, and the refusal of requests from pages of other sites."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from mlxpool.common.files import open_regular

# ---- api keys ------------------------------------------------------------------------------------
# The file of bearer keys for HTTP has a key a line, or a name and a key; `#` begins a comment. A
# key with the third word `operator` may read the gateway's metrics.


MIN_KEY_LENGTH = 16  # characters; a shorter key can be guessed
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")  # the name of a key, as in logs
SHOWN_DIGITS = 32  # hex digits of a key's digest; they name the owner of an unnamed key
OPERATOR = "operator"
OTHERS = 0o077  # bits of a file's mode for other users


class ApiKey(Struct, frozen=True):
    """A bearer key of the file. `name` is its owner's name; an `operator` may read the metrics."""

    name: str
    operator: bool = False


def digest(key: str) -> bytes:
    """Returns the SHA-256 digest of a key, which is stored instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(file: Path) -> dict[bytes, ApiKey]:
    """Returns the keys of a file, by digest. A key without a name is named by digits of its digest.

    Raises ValueError naming the file if it cannot be read, if other users can read or write it, if
    a line is faulty, or if no line has a key.
    """
    try:
        with open_regular(file) as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            lines = opened.read().decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the keys in {file} cannot be read: {error}") from error
    if mode & OTHERS:
        raise ValueError(
            f"the keys in {file} can be read or written by others (mode {mode:04o}):"
            f" chmod 600 {shlex.quote(str(file))}, and make new ones if somebody may have seen them"
        )
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        operator = len(words) == 3 and words[2] == OPERATOR
        key, name = words[min(len(words), 2) - 1], words[0] if len(words) > 1 else None
        if len(words) > 2 + operator or len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"{file}, line {number}: a line is KEY or NAME KEY or NAME KEY {OPERATOR}, and a"
                f" key is one word of at least {MIN_KEY_LENGTH} characters; it has {len(words)}"
                f" words, the key {len(key)} characters (make a key with `openssl rand -hex 32`)"
            )
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(
                f"{file}, line {number}: a name has 1 to 64 letters, digits and . _ @ -"
            )
        hashed = digest(key)
        keys[hashed] = ApiKey(name or f"sha256:{hashed.hex()[:SHOWN_DIGITS]}", operator)
    if not keys:
        raise ValueError(f"{file} has no key: write one a line")
    return keys


# ---- cross site ----------------------------------------------------------------------------------
# Browsers name the page that sends an HTTP request in the headers Origin and Sec-Fetch-Site. A form
# or a script of any page can send a request without a preflight; the page then cannot read the
# answer. A server that only withholds its CORS permission still performs such a request.


SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing; OPTIONS is a preflight
OWN_SITES = ("same-origin", "none")  # of Sec-Fetch-Site; none: the user typed the address


def foreign_page(
    method: str,
    host: str,
    origins: Sequence[str],
    sites: Sequence[str],
    allowed: Collection[str] = (),
) -> str | None:
    """Returns a text that names the foreign web page that sent a request; None if none did.

    A page is foreign if its origin is neither the server nor one of the `allowed` origins; "*"
    allows all origins. `host` is the header Host; `origins` and `sites` are all values of the
    headers Origin and Sec-Fetch-Site. A request in which one of these two headers occurs twice is
    treated as a foreign page's request. For a safe `method`, such as GET, the result is None.
    Programs other than browsers, and old browsers, do not send Origin. Browsers send Sec-Fetch-Site
    only to https and to the loopback interface.
    """
    if method in SAFE_METHODS or "*" in allowed:
        return None
    if len(origins) > 1 or len(sites) > 1:
        return "a request with two headers Origin or Sec-Fetch-Site"
    origin = origins[0] if origins else None
    if origin is not None and origin in allowed:
        return None
    if origin is not None and _place(origin) != host.lower():
        return f"a page of {origin!r:.80}"
    if sites and sites[0].lower() not in OWN_SITES:
        return f"a page of another origin (Sec-Fetch-Site: {sites[0]!r:.40})"
    return None


def _place(origin: str) -> str:
    """Returns host and port of an origin in the form of the header Host; "" if it has no host."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
