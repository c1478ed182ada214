"""The faults that the counting model's settings can request: name, site and time.

The names of the faults are in `bounds.FAULTS`. The setting `fault_in` is the site in the code. The
setting `fault_at` is a number that chooses the time. Depending on the site, it is the number of a
load step (0 to 9), a prompt token, a position of the completion, or a frame of deltas (from 0). At
the sites accept, end and after_end it is ignored: every request with `fault_prompt` in its prompt
gets the fault.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxpool.common.config.schema import Counting, WorkerConfig
from mlxpool.common.trace import History
from mlxpool.worker.weights.locate import COUNTING

SLOW_SECONDS = 0.2
LEAK_BYTES = 16 * 1024 * 1024  # bytes of an allocation
LEAK_INTERVAL = 0.01  # seconds
NATIVE_SLEEP = 10**6  # seconds of a native call that does not return
DEVICE = "device"  # no error here: every later computation raises DeviceGone
FRAME_FAULTS = frozenset({"garbage", "duplicate", "late", "stale"})  # see faulty_link.py
NUMBERED_SITES = frozenset({"load", "prefill", "decode", "send"})


class Struck(RuntimeError):
    """The error that the fault `raise` raises."""


class DeviceGone(RuntimeError):
    """The error of every computation after the fault `device`."""


class Faults:
    """The fault that the counting model's settings request; `site` is its point in the code.

    If `site` is "", no fault is injected.
    """

    def __init__(self, settings: Counting, history: History | None = None) -> None:
        self._settings = settings
        self._history = history
        self._recorded = False
        self.device_lost = False
        self._prompt = settings.fault_prompt.encode()
        self.site = settings.fault_in if settings.fault else ""
        if settings.fault in FRAME_FAULTS and self.site != "send":
            self.site = ""

    @classmethod
    def armed_by(cls, settings: Counting, incarnation: int, history: History) -> Faults:
        """Returns the fault of the settings, or NO_FAULTS if this worker must not get it.

        `incarnation`: the number of earlier workers in this worker's slot. The first `fault_times`
        workers get the fault; 0: all.
        """
        times = settings.fault_times
        return cls(settings, history) if not times or incarnation < times else NO_FAULTS

    @property
    def name(self) -> str:
        return self._settings.fault

    def concerns(self, prompt: bytes) -> bool:
        """Returns whether requests with this prompt get the fault."""
        return self._prompt in prompt

    def is_due(self, span: range) -> bool:
        """Returns whether the setting `fault_at`, a number that chooses the time, is in `span`.

        Always True for the fault `slow`, and at sites without numbers.
        """
        unnumbered = self.site not in NUMBERED_SITES or self.name == "slow"
        return unnumbered or self._settings.fault_at in span

    def victim(self, prompts: Sequence[Sequence[int]], spans: Sequence[range]) -> int | None:
        """Returns the index of the first prompt that gets the fault now, or None.

        `spans`: for each prompt, the range of numbers that `fault_at` may match in this step.
        """
        for number, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
            if self.is_due(span) and (not self._prompt or self.concerns(text_of(prompt))):
                return number
        return None

    def strike_at(self, site: str, number: int = 0) -> None:
        """Injects the fault for any prompt, if the settings request it at this site and time.

        `number`: a number to compare with the setting `fault_at`, such as the number of a load
        step.
        """
        if self.site == site and self.is_due(range(number, number + 1)):
            self.strike()

    def strike(self) -> None:
        """Injects the fault. Raises Struck for `raise`; most other faults never return."""
        self._record()
        if self.name == DEVICE:
            self.device_lost = True
        elif self.name not in FRAME_FAULTS:
            ACTIONS[self.name]()

    def require_device(self) -> None:
        """Raises DeviceGone if the device is lost. Called before each computation."""
        if self.device_lost:
            raise DeviceGone("the fault `device` is set for this counting model")

    def _record(self) -> None:
        """Writes a line of the history file, so that a checker knows the injected faults."""
        if self._history is not None and not (self._recorded and self.name == "slow"):
            self._history.write("fault", name=self.name, place=self.site)
        self._recorded = True


def text_of(prompt: Sequence[int]) -> bytes:
    """Returns the text of a prompt of the counting model; an id above 255 is read as 0."""
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
    while True:  # a signal to this thread interrupts the call
        call(NATIVE_SLEEP)


def _leak() -> None:
    kept: list[bytearray] = []
    while True:
        kept.append(bytearray(b"\1") * LEAK_BYTES)
        time.sleep(LEAK_INTERVAL)


# The action of each fault, by its name. Faults of frames and of the device have no action.
ACTIONS: dict[str, Callable[[], object]] = {
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
    "slow": lambda: time.sleep(SLOW_SECONDS),
}

NO_FAULTS = Faults(Counting())


def faults_of(config: WorkerConfig, history: History) -> Faults:
    """Returns the fault that the counting model's settings request for this worker.

    Returns NO_FAULTS for any other model.
    """
    if config.model.path != COUNTING:
        return NO_FAULTS
    return Faults.armed_by(config.model.counting, config.incarnation, history)
