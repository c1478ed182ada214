"""What goes wrong in the counting model on purpose, by name; nothing unless its settings say so.

The names and places are those of `values.FAULTS` and of `fault_in`. `fault_at` counts load steps
(0 to 9), tokens of the prompt, positions of the completion, or `deltas` frames from 0; the places
accept, end and after_end have no number: there every request that fits is hit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxpool.common.config.schema import Counting
from mlxpool.common.trace import History

SLOW = 0.2  # seconds
LEAK = 16 * 1024 * 1024  # bytes
LEAK_EVERY = 0.01  # seconds
LONG = 10**6  # seconds, of a native call that does not return
DEVICE = "device"  # raises nothing itself: what computes does from then on
OF_FRAMES = frozenset({"garbage", "duplicate", "late", "stale"})  # done by the worker's edge
NUMBERED = frozenset({"load", "prefill", "decode", "send"})


class Struck(RuntimeError):
    """The fault `raise`."""


class DeviceGone(RuntimeError):
    """Computing after the fault `device`."""


class Faults:
    """`place` is where something is to go wrong: "" in a healthy worker, and nothing else costs."""

    def __init__(self, settings: Counting, history: History | None = None) -> None:
        self._settings = settings
        self._history = history
        self._told = False
        self.device_lost = False
        self._prompt = settings.fault_prompt.encode()
        self.place = settings.fault_in if settings.fault else ""
        if settings.fault in OF_FRAMES and self.place != "send":
            self.place = ""

    @classmethod
    def armed_by(cls, settings: Counting, incarnation: int, history: History) -> Faults:
        """Those of the settings, if they concern this worker of its slot."""
        times = settings.fault_times
        return cls(settings, history) if not times or incarnation < times else NO_FAULTS

    @property
    def name(self) -> str:
        return self._settings.fault

    def concerns(self, prompt: bytes) -> bool:
        """Whether the prompt is one of those that are hit."""
        return self._prompt in prompt

    def now(self, span: range) -> bool:
        """Whether the number is in `span`; `slow` is slow everywhere."""
        unnumbered = self.place not in NUMBERED or self.name == "slow"
        return unnumbered or self._settings.fault_at in span

    def victim(self, prompts: Sequence[Sequence[int]], spans: Sequence[range]) -> int | None:
        """The first of these rows that is hit in its span."""
        for number, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            if self.now(span) and (not self._prompt or self.concerns(text_of(prompt))):
                return number
        return None

    def at(self, place: str, number: int = 0) -> None:
        """Strike if this is the place and the number; for places without a prompt."""
        if self.place == place and self.now(range(number, number + 1)):
            self.strike()

    def strike(self) -> None:
        """Do it. Raises Struck for `raise`; most others never come back."""
        self.tell()
        if self.name == DEVICE:
            self.device_lost = True
        elif self.name not in OF_FRAMES:
            _DEEDS[self.name]()

    def compute(self) -> None:
        """Called by what computes. Raises DeviceGone once the device is lost."""
        if self.device_lost:
            raise DeviceGone("the fault `device` is set for this counting model")

    def tell(self) -> None:
        """Write it down; a checker has to know what we did."""
        if self._history is not None and not (self._told and self.name == "slow"):
            self._history.write("fault", name=self.name, place=self.place)
        self._told = True


def text_of(prompt: Sequence[int]) -> bytes:
    """A prompt's text; an id that is no byte stands for a zero."""
    return bytes(token if token < 256 else 0 for token in prompt)


def _raise() -> None:
    raise Struck("the fault `raise` is set for this counting model")


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _sleep_in(library: type[ctypes.CDLL]) -> None:
    call: Any = library(None).sleep
    while True:  # a signal to this very thread cuts the call short
        call(LONG)


def _leak() -> None:
    kept: list[bytearray] = []
    while True:
        kept.append(bytearray(b"\1") * LEAK)
        time.sleep(LEAK_EVERY)


_DEEDS: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "kill": lambda: _signal(signal.SIGKILL),
    "stop": lambda: _signal(signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "exit3": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "lock": _lock,
    "native": lambda: _sleep_in(ctypes.CDLL),
    "gil": lambda: _sleep_in(ctypes.PyDLL),
    "leak": _leak,
    "slow": lambda: time.sleep(SLOW),
}

NO_FAULTS = Faults(Counting())
