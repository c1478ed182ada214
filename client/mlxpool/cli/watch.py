"""Subscribes to `watch`: a snapshot of the pool each second, for `top` and `stats --watch`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import zmq

from mlxpool.cli.admin import no_answer
from mlxpool.cli.style import Paint, paint_of
from mlxpool.cli.target import Target
from mlxpool.cli.terminal import screen
from mlxpool.common.closing import Closing
from mlxpool.common.errors import BrokerLost, from_body
from mlxpool.common.protocol import admin, frames, to_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.transport import sockets

FIRST_TIMEOUT = 2.0  # seconds until the first snapshot, as for the answer to any command
NEXT_TIMEOUT = 5.0  # seconds without a snapshot after which the broker counts as gone
RENEW_INTERVAL = 2.0  # seconds; the broker drops a subscription after five without renewal
MAX_POLL_MS = 100
KEY_INTERVAL = 0.1  # seconds between two reads of the keyboard


class Subscription(Closing):
    """A subscription to `watch` that renews itself. Only one thread may use it."""

    def __init__(self, target: Target) -> None:
        """Raises BadKey if a key cannot be used."""
        self._target = target
        self._endpoint = target.endpoint_of("admin")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.dealer(self._context, self._endpoint, target.credentials())
        self._id = os.urandom(frames.ID_BYTES)
        self._renewed_at = float("-inf")
        self._lost_at = time.monotonic() + FIRST_TIMEOUT

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next snapshot; None if none comes within `seconds`.

        Raises BrokerLost naming the endpoint if there was no snapshot for FIRST_TIMEOUT (the first
        snapshot) or NEXT_TIMEOUT. Raises the error in the broker's answer.
        """
        end = time.monotonic() + seconds
        while True:
            self._renew()
            left_ms = max(0, round(1000 * (end - time.monotonic())))
            if self._socket.poll(min(MAX_POLL_MS, left_ms)):
                return self._receive()
            now = time.monotonic()
            if now > self._lost_at:
                raise BrokerLost(no_answer(self._target.run_dir, self._endpoint))
            if now >= end:
                return None

    def _renew(self) -> None:
        now = time.monotonic()
        if now - self._renewed_at >= RENEW_INTERVAL:
            self._renewed_at = now
            self._socket.send_multipart(frames.encode(Header(admin.WATCH, self._id), {}))

    def _receive(self) -> dict[str, Any]:
        message = frames.decode(self._socket.recv_multipart(), max_body=frames.MAX_BLOB)
        self._lost_at = time.monotonic() + NEXT_TIMEOUT
        if message.kind == to_client.Failed.kind:
            raise from_body(message.body)
        return message.body

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def snapshots(target: Target, count: int = 0) -> Iterator[dict[str, Any]]:
    """Yields `count` snapshots, one per second; if `count` is 0, yields snapshots without end."""
    with Subscription(target) as subscription:
        seen = 0
        while not count or seen < count:
            snapshot = subscription.next(NEXT_TIMEOUT + 1)
            if snapshot is not None:
                seen += 1
                yield snapshot


class View(Protocol):
    """An interface: pages of snapshots that the user controls with keys."""

    def press(self, keys: str) -> bool:
        """Applies pressed keys. Returns False to end."""

    def take(self, snapshot: Mapping[str, Any]) -> None: ...

    def page(self, columns: int, height: int, *, keys: bool, paint: Paint) -> str:
        """Returns the page; "" if there is none yet. With `keys` it names the keys to press."""


def show_pages(target: Target, count: int, view: View) -> None:
    """Draws a page for each snapshot and each key, until a key ends the view.

    With a `count` above 0, also ends after this number of snapshots.
    """
    paint, left = paint_of(sys.stdout), count
    with Subscription(target) as subscription, screen() as terminal:
        while True:
            newest, keys = subscription.next(KEY_INTERVAL), terminal.pressed_keys()
            if not view.press(keys):
                return
            if newest is not None:
                view.take(newest)
                left -= 1
            if newest is not None or keys:
                page = view.page(*terminal.size, keys=terminal.live, paint=paint)
                if page:
                    terminal.show(page)
            if newest is not None and left == 0:
                return
