"""Admits requests to the gateway: checks the key, its concurrent requests, and the host.

The file of keys has a key, or a name and a key, in each line. The file is read again when the
process gets SIGHUP.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hmac
import ipaddress
import logging
import re
import socket
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct
from starlette.requests import Request

from mlxpool.common.config.bounds import LOOPBACK
from mlxpool.common.http_access import digest, foreign_page, read_keys
from mlxpool.gateway.errors import HttpError

log = logging.getLogger("mlxpool.gateway")

HOST = re.compile(r"\[?([^\]]*?)\]?(?::\d+)?")  # a name or an address, and a port
LOCAL_ENDS = (".localhost", ".local", ".internal")  # top-level names of private networks


class Owner(Struct, frozen=True):
    """The owner of an API key: the key's digest, and the owner's name in logs (None without keys).

    `operator`: the owner may read the metrics.
    """

    digest: bytes
    name: str | None
    operator: bool = False  # may read the metrics


NOBODY = Owner(b"", None, operator=True)
# The name of the owner on whose behalf this task calls the pool; "" for the gateway itself.
current_owner: contextvars.ContextVar[str] = contextvars.ContextVar("current_owner", default="")


def is_local_host(host: str, machine: str, *, from_page: bool) -> bool:
    """Whether a Host header names this machine or its private network, by Ollama's rules.

    `machine`: this machine's name. `from_page`: the request has the Origin header of a web page. A
    page on the internet cannot have one of the allowed hosts: DNS rebinding does not work for an IP
    address, and nobody can register the top-level names in LOCAL_ENDS. But another machine of the
    network can answer for a name in LOCAL_ENDS, so requests of pages may not use such a name.
    """
    host = host.removesuffix(".")
    if host in LOOPBACK:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return not from_page and (host == machine or host.endswith(LOCAL_ENDS))
    return address.is_private or address.is_unspecified  # `is_private` includes loopback


class ApiKeys:
    """The keys that may send requests. Without a file requests need no key."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises ValueError, naming the file and the line, for a file that cannot be used."""
        self._file = file
        self._keys = {} if file is None else read_keys(file)

    @property
    def required(self) -> bool:
        return self._file is not None

    def reload(self) -> None:
        """Reads the file again; if it cannot be used, keeps the present keys."""
        if self._file is None:
            return
        try:
            self._keys = read_keys(self._file)
        except ValueError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("%s has %d keys", self._file, len(self._keys))

    def owner(self, authorization: str | None) -> Owner | None:
        """Returns the owner of the key in a header Authorization; None if the key is unknown.

        Takes the same time for every key. Without a file all requests have the same owner.
        """
        if self._file is None:
            return NOBODY
        scheme, _, key = (authorization or "").partition(" ")
        sent = digest(key.strip())
        known = [hmac.compare_digest(sent, known_digest) for known_digest in self._keys]
        if not any(known) or scheme.lower() != "bearer":
            return None
        return Owner(sent, self._keys[sent].name, self._keys[sent].operator)

    def is_known(self, owner: Owner) -> bool:
        """Whether the file still has the owner's key, with the same name. True without a file."""
        if self._file is None:
            return True
        key = self._keys.get(owner.digest)
        return key is not None and key.name == owner.name


class KeyRevoked(HttpError):
    """The error of a running request whose key was removed."""

    def __init__(self) -> None:
        message = "the key of this request was taken away"
        super().__init__(401, message, "invalid_api_key", retry=False, close=True)


class ConcurrencyLimit:
    """Counts the requests in flight of each owner."""

    def __init__(self, max_requests: int | None) -> None:
        """`max_requests`: how many requests an owner may have at once; None sets no bound."""
        self._max_requests = max_requests
        self._in_flight: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def request(self, owner: bytes) -> Iterator[None]:
        """Counts a request inside the context. Raises HttpError if the owner has too many."""
        if self._max_requests is not None and self._in_flight[owner] >= self._max_requests:
            message = (
                f"{self._max_requests} requests of this key are under way, which is all it may have"
            )
            raise HttpError(429, message, "over_quota", retry_after=1.0)
        self._in_flight[owner] += 1
        try:
            yield
        finally:
            self._in_flight[owner] -= 1
            self._in_flight += Counter()  # drops owners with no request


class AccessControl:
    """Admits requests with known keys only, and a bounded number of concurrent requests per key.

    Without keys the gateway serves only its own machine. The Host header must then be a local name,
    see `is_local_host`, so that a page cannot reach the gateway by DNS rebinding.
    """

    def __init__(
        self,
        keys: ApiKeys,
        limit: ConcurrencyLimit,
        *,
        names_owners: bool = False,
        cors_origins: Collection[str] = (),
    ) -> None:
        """`names_owners`: the gateway calls the pool on behalf of the key's owner.

        `cors_origins`: the origins whose pages may use the gateway in browsers.
        """
        self._keys = keys
        self._limit = limit
        self._names_owners = names_owners
        self._running: dict[asyncio.Task[object], Owner] = {}
        self._revoked: set[asyncio.Task[object]] = set()
        self._cors_origins = cors_origins
        self._machine = socket.gethostname().lower()

    def check_origin(self, request: Request) -> None:
        """Raises HttpError for a cross-origin request of a page, unless the request only reads."""
        of = request.headers
        page = foreign_page(
            request.method,
            of.get("host", ""),
            of.getlist("origin"),
            of.getlist("sec-fetch-site"),
            self._cors_origins,
        )
        if page is not None:
            message = f"{page} may not use the gateway: --cors-origin names whose pages may"
            raise HttpError(403, message, "origin_not_allowed", retry=False)

    @contextlib.contextmanager
    def admitted(self, request: Request) -> Iterator[Owner]:
        """Returns the context in which an admitted request runs.

        Raises HttpError if the request is not admitted. Raises KeyRevoked in the context when
        `end_revoked` finds that the key was removed.
        """
        if not self._keys.required:
            self._check_host(request)
        if len(request.headers.getlist("authorization")) > 1:
            message = "the header Authorization is there more than once; send one"
            raise HttpError(400, message, "bad_request", retry=False)
        owner = self._keys.owner(_authorization(request))
        if owner is None:
            message = "a valid key is required: Authorization: Bearer KEY, or x-api-key: KEY"
            raise HttpError(401, message, "invalid_api_key", retry=False)
        with self._limit.request(owner.digest), self._revocable(owner):
            before = current_owner.set(owner.name or "" if self._names_owners else "")
            try:
                yield owner
            finally:
                current_owner.reset(before)

    def _check_host(self, request: Request) -> None:
        """Raises HttpError for a Host that a page on the internet could have."""
        # Browsers always send a host; programs with HTTP/1.0 need not.
        host = HOST.fullmatch(request.headers.get("host", "localhost"))
        allowed, origin = self._cors_origins, request.headers.get("origin")
        from_page = origin is not None and origin not in allowed and "*" not in allowed
        if host and is_local_host(host[1].lower(), self._machine, from_page=from_page):
            return
        ends = "" if from_page else "".join(f", *{end}" for end in LOCAL_ENDS)
        message = f"without keys it is asked as localhost{ends} or a private address only"
        raise HttpError(403, f"{message}; see --keys", "host_not_allowed", retry=False)

    @contextlib.contextmanager
    def _revocable(self, owner: Owner) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = owner
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._revoked:
                raise
            task.uncancel()
            raise KeyRevoked from None
        finally:
            del self._running[task]
            self._revoked.discard(task)

    def end_revoked(self) -> None:
        """Ends the requests whose keys are no longer known. Runs on the event loop."""
        for task, owner in self._running.items():
            if task not in self._revoked and not self._keys.is_known(owner):
                self._revoked.add(task)
                task.cancel()
        if self._revoked:
            log.info("requests of revoked keys end", extra={"requests": len(self._revoked)})


def _authorization(request: Request) -> str | None:
    """Returns the header Authorization; Anthropic's clients send their key in x-api-key instead."""
    authorization = request.headers.get("authorization")
    key = request.headers.get("x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization
