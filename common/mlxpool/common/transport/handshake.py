"""Reads the monitor of a connecting socket: whether it is connected, or why it cannot be.

A broker that refuses a key says so, and libzmq then connects no more. Other failures, such as a
wrong server key, look like a connection that breaks: libzmq connects again and again.
"""

from __future__ import annotations

import struct

import zmq

from mlxpool.common.transport.keys import Credentials, section

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
HOPELESS_FAILURES = 3  # in a row; a broker that is ending may fail one or two
_SHORT = 8  # characters of a public key that error messages show


class Handshake:
    """A socket's handshake; belongs to the socket's thread. `monitor` is readable on a change."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, credentials: Credentials | None = None
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self.refusal = ""  # why this socket will never be connected; "": it may be
        self.trouble = ""  # why the newest attempt failed; a later one may succeed
        self.failures = 0  # failed attempts in a row
        self._socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)

    def succeeded(self) -> bool:
        """Read the monitor; whether a handshake succeeded since the last call."""
        found = False
        try:
            while True:
                event, _ = struct.unpack("=hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                found = self._take(event) or found
        except zmq.Again:
            return found

    def _take(self, event: int) -> bool:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal, self.trouble, self.failures = "", "", 0
            return True
        if self.endpoint.startswith("ipc:") and event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return False  # ipc has no keys; a broker without free descriptors closes it like this
        self.failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self.trouble = refused(self.endpoint, self.credentials)
        else:
            self.trouble = failed(self.endpoint, self.credentials)
        return False

    @property
    def hopeless(self) -> bool:
        """Whether a client that was never connected should stop trying."""
        return bool(self.refusal) or self.failures >= HOPELESS_FAILURES

    def close(self) -> None:
        """Close the monitor; has to be called before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close()


def refused(endpoint: str, credentials: Credentials | None) -> str:
    """The error message for a refused key."""
    if credentials is None:
        return f"the broker at {endpoint} refuses this user"
    own = credentials.own
    return (
        f"the broker at {endpoint} refuses the key {own.name!r} ({own.role},"
        f" {own.public[:_SHORT]}…): it is not in the allow-list, was revoked, or its role is not"
        f" for this endpoint; add it to the broker's config as {section(own.name)} and reload that"
    )


def failed(endpoint: str, credentials: Credentials | None) -> str:
    """The error message for a handshake that fails without a refusal."""
    if credentials is None:
        return (
            f"what listens at {endpoint} takes no connection without a key;"
            " give --server-key and --key (server_key=, key=)"
        )
    return (
        f"what listens at {endpoint} does not answer to the server key"
        f" {credentials.server[:_SHORT]}… (key {credentials.own.name!r}): it is not that broker's"
        " public key, or the endpoint is no CURVE endpoint of a broker"
    )
