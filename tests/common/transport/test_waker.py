"""A waker ends another thread's poll by bytes, which stay readable until they are drained."""

from __future__ import annotations

import os
import signal
import threading
import time

import zmq

from mlxpool.common.transport.waker import Waker
from support.pool import PATIENCE


def test_wake_ends_a_poll_of_another_thread() -> None:
    with Waker() as waker:
        poller = zmq.Poller()
        poller.register(waker, zmq.POLLIN)
        assert poller.poll(0) == []
        threading.Timer(0.01, waker.wake).start()
        assert poller.poll(int(PATIENCE * 1000))
        assert waker.drain() == b"\0"
        assert poller.poll(0) == [] and waker.drain() == b""


def test_a_full_buffer_neither_blocks_nor_raises() -> None:
    with Waker() as waker:
        for _ in range(100_000):
            waker.wake()
        assert waker.drain() and waker.drain() == b""


def test_wakes_after_the_end_are_ignored() -> None:
    waker = Waker()
    waker.close()
    waker.wake()


def test_a_signal_wakes_with_its_number() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    with Waker() as waker:
        previous = waker.wake_on_signals()
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            end = time.monotonic() + PATIENCE
            while not (received := waker.drain()) and time.monotonic() < end:
                time.sleep(0.001)
            assert received == bytes([signal.SIGUSR2])
        finally:
            signal.set_wakeup_fd(previous)
            signal.signal(signal.SIGUSR2, before)
