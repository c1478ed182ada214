"""Checks the endpoints to bind, with or without CURVE, and the endpoints to connect to. Pure."""

from __future__ import annotations

import re

_IPC = re.compile(r"ipc://.+")
_TCP = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(\d{1,5}|\*)")
_DIALLED = re.compile(r"tcp://(\[[0-9a-fA-F:.]+(%\w+)?\]|[A-Za-z0-9._-]+):(\d{1,5})")
_HOST_AND_PORT = re.compile(r"[A-Za-z0-9._-]+:\d{1,5}")
_LOOPBACK = re.compile(r"tcp://(127(\.\d{1,3}){3}|localhost|\[::1\]):(\d{1,5}|\*)")


def fault(endpoint: str, *, secured: bool, local: bool) -> str | None:
    """Returns the reason why an endpoint may not be bound; None if it may be bound.

    The reason is the second half of an error message. `secured` is True if the process has a secret
    key: every tcp endpoint then uses CURVE. `local` is True if plain tcp is allowed on the loopback
    interface.
    """
    if _IPC.fullmatch(endpoint):
        return None
    if not _TCP.fullmatch(endpoint) or _port(endpoint) > 65535:
        return "must be tcp://HOST:PORT or ipc://PATH"
    if secured or (local and _LOOPBACK.fullmatch(endpoint)):
        return None
    only = "plain tcp is for 127.0.0.1 and [::1] alone" if local else "tcp is never plain here"
    return (
        f"needs encryption: {only}; make a key with `mlxpool keygen NAME --role server`"
        " and name its file in pool.secret_key"
    )


def dial_fault(endpoint: object) -> str | None:
    """Returns the error message for an endpoint that cannot be connected to; None if it can be."""
    text = endpoint if isinstance(endpoint, str) else ""
    if _IPC.fullmatch(text) or (_DIALLED.fullmatch(text) and 0 < _port(text) <= 65535):
        return None
    hint = ""
    if _HOST_AND_PORT.fullmatch(text):
        hint = f"; did you mean 'tcp://{text}'?"
    elif text.startswith(("/", "./", "~")):
        hint = f"; did you mean 'ipc://{text}', or the run directory?"
    return f"the endpoint must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r:.200}{hint}"


def _port(endpoint: str) -> int:
    port = endpoint.rpartition(":")[2]
    return 0 if port == "*" else int(port)
