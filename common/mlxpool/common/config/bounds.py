"""Values of settings: what their text means, and within which bounds they may lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxpool.common.transport.keys import PEERS


class ConfigError(ValueError):
    """Settings are unknown, of the wrong type or out of bounds; each problem names its setting."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  ".join([f"{len(self.problems)} settings are wrong:", *self.problems])


class Faults:
    """What was found wrong until now: reading goes on, so that all of it is told at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Keep what a ConfigError of the body says."""
        try:
            yield
        except ConfigError as error:
            self.problems += error.problems

    def tell(self) -> None:
        """Raises ConfigError with every problem, if there is one."""
        if self.problems:
            raise ConfigError(*self.problems)


def convert(key: str, annotation: str, value: Any, where: str) -> Any:
    """A value as the setting `key` has it. Raises ConfigError naming `where`."""
    if key in ("keep_alive",) or annotation == "float":
        return seconds(value, where)
    if annotation == "int":
        return (
            size(value, where)
            if key.endswith("bytes") or key == "memory_limit"
            else _int(value, where)
        )
    if annotation == "bool":
        value = {"true": True, "false": False}.get(value, value) if key in _IN_THE_AIR else value
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    if annotation.startswith("tuple"):
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise ConfigError(f"{where} must be a list of strings, got {value!r}")
        return tuple(items)
    if not isinstance(value, str | Path):
        raise ConfigError(f"{where} must be a string, got {value!r}")
    return Path(value).expanduser().absolute() if annotation.startswith("Path") else str(value)


def _int(value: Any, where: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be an integer, got {value!r}")
    return value


_IN_THE_AIR = ("local_workers",)  # true or false as text: so it comes from the environment
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def seconds(value: Any, where: str) -> float:
    """A time as a number of seconds or as text: "250ms", "5m", "-1"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?", str(value).strip())
    if not match or not isinstance(value, str):
        raise ConfigError(f'{where} must be a time such as "5m" or "250ms", got {value!r}')
    return float(match[1]) * _UNITS[match[2] or "s"]


def size(value: Any, where: str) -> int:
    """A size as a number of bytes or as text: "4GB", "512MiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if not match or not isinstance(value, str) or match[2].upper() not in _BYTES:
        raise ConfigError(f'{where} must be a size such as "4GB", got {value!r}')
    return int(float(match[1]) * _BYTES[match[2].upper()])


def host_port(text: str, where: str = "pool.metrics") -> tuple[str, int]:
    """The parts of "127.0.0.1:9464" or "[::1]:9464"; port 0 takes a free one."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if not match or int(match[3]) > 65535:
        raise ConfigError(f'{where} must be HOST:PORT such as "127.0.0.1:9464", got {text!r}')
    return match[1] or match[2], int(match[3])


BOUNDS: dict[str, tuple[float, float]] = {
    "context": (0, 2**31 - 1),
    "replicas": (1, 64),
    "sequences": (1, 4096),
    "queue_limit": (1, 10**6),
    "queue_bytes": (1024, 2**50),
    "unread_bytes": (1024, 2**50),
    "restart_limit": (1, 1000),
    "deadline": (0.001, 10**7),
    "client_grace": (0.1, 10**6),
    "ack_grace": (0.1, 10**6),
    "restart_delay": (0.0, 3600.0),
    "restart_delay_max": (0.0, 86400.0),
    "probe_interval": (0.1, 10**6),
    "stop_grace": (0.0, 600.0),
    "worker_log_bytes": (1024, 2**50),
    "vocab": (256, 2**31 - 1),
    "keep_alive": (-1.0, 10**8),
    "load_ms": (0, 10**7),
    "prefill_us": (0, 10**9),
    "step_us": (0, 10**9),
    "joint": (1, 1024),
    "fault_at": (0, 2**31 - 1),
    "fault_times": (0, 2**31 - 1),
    "load_bytes": (0, 2**62),
    "memory_limit": (0, 2**62),
    "prefix_bytes": (0, 2**62),
    "drain_grace": (0.0, 10**6),
    "poison_life": (0.0, 10**7),
    "beat_limit": (0.1, 10**6),
    "quota_requests": (0, 10**6),
    "quota_tokens": (0, 2**40),
    "quota_bytes": (0, 2**40),
    "quota_cancels": (0, 10**6),
    "load_limit": (0.1, 10**6),
    "prefill_limit": (0.1, 10**6),
    "step_limit": (0.1, 10**6),
    "fresh_limit": (0.1, 10**6),
}
FAULTS = (
    "",
    "raise",  # an error inside the step
    "kill",  # SIGKILL to itself
    "stop",  # SIGSTOP to itself
    "exit",  # os._exit(0)
    "exit3",  # os._exit(3)
    "segfault",
    "abort",
    "lock",  # waits for a lock that nobody opens
    "native",  # stuck in native code, the interpreter free
    "gil",  # stuck in native code, the interpreter held
    "leak",  # allocates until somebody ends it
    "device",  # the device is lost: what computes fails, now and ever after
    "slow",  # takes 200 ms where it would take none; healthy
    "garbage",  # a frame that is no message (in send)
    "duplicate",  # a frame twice (in send)
    "late",  # a frame again after those that followed it (in send)
    "stale",  # a frame again with the epoch before (in send)
)
CHOICES: dict[str, tuple[str, ...]] = {
    "prefix_cache": ("tree", "single", "off"),
    "log_format": ("text", "json"),
    "role": PEERS,
    "fault": FAULTS,
    "fault_in": ("load", "accept", "prefill", "decode", "end", "after_end", "send"),
}


def check(name: str, value: Any, where: str) -> None:
    """Raises ConfigError for a value that its setting cannot have: bounds, choices, form."""
    low, high = BOUNDS.get(name, (None, None))
    if low is not None and high is not None and not low <= value <= high:
        raise ConfigError(f"{where} is {value}, must be from {low:g} to {high:g}")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(f"{where} is {value!r}, must be of {CHOICES[name]}")
    if name == "metrics" and value:
        host_port(value, where)
