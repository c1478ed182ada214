"""What the monitor of a dialling socket tells: that it is connected, or why it never will be.

A broker that refuses a key says so, and libzmq then dials no more. Other failures, such as a wrong
server key, look like a connection that breaks: libzmq redials, and only time tells.
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
TRIES = 3  # a broker that is just ending may break one or two
_SHOWN = 8  # characters of a public key: enough to tell it from others


class Handshake:
    """Belongs to the thread of its socket. `monitor` is readable when there is news."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, credentials: Credentials | None = None
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self.refusal = ""  # why nothing more comes of this socket
        self.trouble = ""  # why the newest try failed, which a later one need not
        self.failures = 0  # tries in a row that failed
        self._socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)

    def succeeded(self) -> bool:
        """Read the news; whether a connection has come about since the last call."""
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
            return False  # keys have no part in it; a broker without descriptors breaks it off so
        self.failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self.trouble = refused(self.endpoint, self.credentials)
        else:
            self.trouble = failed(self.endpoint, self.credentials)
        return False

    @property
    def hopeless(self) -> bool:
        """Whether who has never been let in need not try any longer."""
        return bool(self.refusal) or self.failures >= TRIES

    def close(self) -> None:
        """Stop watching; before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close()


def refused(endpoint: str, credentials: Credentials | None) -> str:
    """What to tell somebody whose key was refused."""
    if credentials is None:
        return f"the broker at {endpoint} refuses this user"
    own = credentials.own
    return (
        f"the broker at {endpoint} refuses the key {own.name!r} ({own.role},"
        f" {own.public[:_SHOWN]}…): it is not in the allow-list, was revoked, or its role is not"
        f" for this endpoint; add it to the broker's config as {section(own.name)} and reload that"
    )


def failed(endpoint: str, credentials: Credentials | None) -> str:
    """What to tell somebody who cannot agree with what is there on how to speak."""
    if credentials is None:
        return (
            f"what listens at {endpoint} takes no connection without a key;"
            " give --server-key and --key (server_key=, key=)"
        )
    return (
        f"what listens at {endpoint} does not answer to the server key"
        f" {credentials.server[:_SHOWN]}… (key {credentials.own.name!r}): it is not that broker's"
        " public key, or the endpoint is no CURVE endpoint of a broker"
    )
