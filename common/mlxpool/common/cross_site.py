"""Whether a page of another site sent an HTTP request: browsers say so in two headers.

A form or a script of any page can send a request whose answer it cannot read, without asking the
server first, so a server that only withholds its consent (CORS) performs it all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # that change nothing; OPTIONS is a browser's question
OWN_SITES = ("same-origin", "none")  # none: an address that the user has typed


def foreign_page(
    method: str,
    host: str,
    origins: Sequence[str],
    sites: Sequence[str],
    allowed: Collection[str] = (),
) -> str | None:
    """Returns what sent a request that may change something, if it is a page of another origin.

    `host`, `origins` and `sites` are the headers Host, Origin and Sec-Fetch-Site, with all their
    values. Programs send no Origin, browsers always, but for old ones; Sec-Fetch-Site they send to
    https and to the loopback interface. Pages of the `allowed` origins are none; "*": of all.
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
    """Host and port of an origin as the header Host has them; "" for `null` and what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
