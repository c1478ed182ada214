"""The record of one HTTP request and its response, for access log and metrics. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

# Routes of requests that the table of routes does not have.
OTHER_ROUTE = "other"  # unknown paths, absolute URLs, CONNECT
PREFLIGHT = "preflight"  # a browser asks if a page may send a request
UNPARSABLE = "unparsable"  # bytes that are not an HTTP request
FURTHER_ROUTES = (OTHER_ROUTE, PREFLIGHT, UNPARSABLE)
CLIENT_DISCONNECTED = "client_disconnected"  # the error code of a request whose client is gone
NOT_HTTP = "not_http"  # the error code of UNPARSABLE
DISCONNECTED = 499  # status of a request whose client disconnected before the response, as in nginx
REQUEST_ID = "x-request-id"
# Ids of proxies and tracing systems: UUIDs, ULIDs, AWS's `Root=1-…;…`, Google's `TRACE/SPAN;o=1`.
SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:;=/+@-]{0,127}")
# A part of a path that cannot be a key or a part of a key: a key has 16 characters or more, and may
# have a slash.
SHOWN_PART = re.compile(r"[a-z_.*-]{0,15}(:\d{0,5})?|v\d{1,2}")


class Exchange(Struct, eq=False):
    """The record of one request. Times are monotonic seconds."""

    id: str
    method: str
    route: str  # the route's path in the table of routes
    started: float
    client: str | None = None  # the peer's address
    path: str | None = None  # the requested path, if it is not a route
    key: str | None = None  # the name of the bearer key
    model: str | None = None  # the pool's name for the model
    pool_id: str | None = None  # id of the request, or of its first choice, in the pool's log
    traceparent: str | None = None  # the client's header, if it names a span
    streamed: bool = False
    status: int = 0  # 0: no response has begun
    failure: str | None = None  # the error's code
    first_token: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None

    def count(self, usage: Mapping[str, Any], *, prompt: bool = True) -> None:
        """Adds the tokens of a choice or call.

        `prompt` is False if the tokens of its prompt are already counted.
        """
        if prompt:
            self.prompt_tokens = (self.prompt_tokens or 0) + usage.get("prompt_tokens", 0)
            self.cached_tokens = (self.cached_tokens or 0) + usage.get("cached_tokens", 0)
        generated = usage.get("completion_tokens")
        if generated is not None:
            self.completion_tokens = (self.completion_tokens or 0) + generated

    def fields(self, now: float) -> dict[str, Any]:
        """Returns the fields of the request's line in the access log; an unknown value is None."""
        first = self.first_token
        return {
            "request_id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "duration_ms": milliseconds(now - self.started),
            "client": self.client,
            "key": self.key,
            "path": self.path,
            "model": self.model,
            "streamed": self.streamed,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_ms": None if first is None else milliseconds(first - self.started),
            "pool_id": self.pool_id,
            "error": self.failure,
        }


def milliseconds(seconds: float) -> float:
    """Returns a time in milliseconds with one decimal, for a log."""
    return round(seconds * 1000, 1)


def shown_path(path: str) -> str:
    """Returns a path for a log.

    Unusual parts become `…`, because a client may have put its key there.
    """
    parts = path.split("/")
    return "/".join(part if SHOWN_PART.fullmatch(part) else "…" for part in parts)


def request_id(sent: str | None, fallback: str) -> str:
    """Returns the client's X-Request-Id if it suits headers and log lines, else `fallback`."""
    return sent if sent is not None and SANE_ID.fullmatch(sent) else fallback
