"""Reads the monitor of a connecting socket: whether it is connected, or why it cannot be.

Two kinds of failure make libzmq give up a connection. In one, the broker refuses a key. In the
other, a complete greeting of the broker names another security mechanism, because only one side has
keys. In every other failure the connection was closed during the handshake, and libzmq connects
again. A broker closes a connection in this way for a wrong server key. A proxy whose broker
restarts does the same. A socket without keys draws no conclusion from such a failure: a broker with
keys sends its greeting in one of the next attempts.
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
# Consecutive failed attempts with keys after which a client gives up. A broker that ends may cause
# one or two.
HOPELESS_FAILURES = 3
_SHORT = 8  # the most characters of a public key that error messages show


class Handshake:
    """The state of a socket's handshake. Only the socket's thread uses it, and polls `monitor`."""

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, credentials: Credentials | None = None
    ) -> None:
        self.endpoint = endpoint
        self.credentials = credentials
        self.refusal = ""  # why this socket will never be connected; "" if it still may be
        self.trouble = ""  # why the newest attempt failed; a later attempt may succeed
        self.failures = 0  # consecutive failed attempts, for any reason
        self._socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)

    def succeeded(self) -> bool:
        """Reads the monitor. Returns whether a handshake succeeded since the last call."""
        success = False
        try:
            while True:
                event, value = struct.unpack("=HI", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                success = self._take(event, value) or success
        except zmq.Again:
            return success

    def _take(self, event: int, value: int) -> bool:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal, self.trouble, self.failures = "", "", 0
            return True
        self.failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = self.trouble = refused(self.endpoint, self.credentials)
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refusal = self.trouble = failed(self.endpoint, self.credentials)
        elif self.credentials is not None and self.endpoint.startswith("tcp:"):
            self.trouble = failed(self.endpoint, self.credentials)
        return False

    @property
    def hopeless(self) -> bool:
        """True if a client that has never been connected should give up."""
        return bool(self.refusal or (self.trouble and self.failures >= HOPELESS_FAILURES))

    def close(self) -> None:
        """Closes the monitor. Call it before the socket is closed."""
        self._socket.disable_monitor()
        self.monitor.close()


def refused(endpoint: str, credentials: Credentials | None) -> str:
    """Returns the error message for a key that the broker refused."""
    if credentials is None:
        return f"the broker at {endpoint} refuses this user"
    own = credentials.own
    return (
        f"the broker at {endpoint} refuses the key {own.name!r} ({own.role},"
        f" {own.public[:_SHORT]}…): it is not in the allow-list, was revoked, or its role is not"
        f" for this endpoint; add it to the broker's config as {section(own.name)} and reload that"
    )


def failed(endpoint: str, credentials: Credentials | None) -> str:
    """Returns the error message for a handshake that fails without a refusal."""
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
