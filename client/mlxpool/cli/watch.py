"""The admin socket's `watch`: a picture of the pool each second, for `top` and `stats --watch`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import zmq

from mlxpool.cli.operations import nobody
from mlxpool.cli.target import Place
from mlxpool.common.closing import Closing
from mlxpool.common.errors import BrokerLost, from_body
from mlxpool.common.protocol import frames, kinds
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets

FIRST = 2.0  # seconds for the first picture, as for every command's answer
RENEW = 2.0  # seconds; the broker forgets who has not asked for five
SILENCE = 5.0  # seconds without a picture after which nobody is there any more


class Watch(Closing):
    """One connection that asks again by itself."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._endpoint = place.of_socket("admin")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.dealer(self._context, self._endpoint, place.credentials())
        self._id = os.urandom(frames.ID_BYTES)
        self._asked_at = float("-inf")
        self._lost_at = time.monotonic() + FIRST

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next picture, or None when none comes in so many seconds.

        Raises BrokerLost naming the endpoint after FIRST or SILENCE, or what the broker refuses
        with.
        """
        end = time.monotonic() + seconds
        while True:
            self._renew()
            if self._socket.poll(min(100, max(0, round(1000 * (end - time.monotonic()))))):
                return self._take()
            now = time.monotonic()
            if now > self._lost_at:
                raise BrokerLost(nobody(self._place.run_dir, self._endpoint))
            if now >= end:
                return None

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= RENEW:
            self._asked_at = now
            self._socket.send_multipart(frames.encode(Header(kinds.WATCH, self._id), {}))

    def _take(self) -> dict[str, Any]:
        message = frames.decode(self._socket.recv_multipart(), max_body=frames.MAX_BLOB)
        self._lost_at = time.monotonic() + SILENCE
        if message.kind == kinds.ERROR:
            raise from_body(message.body)
        return message.body

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def pictures(place: Place, count: int = 0) -> Iterator[dict[str, Any]]:
    """So many pictures, a second apart; 0: for ever."""
    with Watch(place) as watch:
        seen = 0
        while not count or seen < count:
            picture = watch.next(SILENCE + 1)
            if picture is not None:
                seen += 1
                yield picture
