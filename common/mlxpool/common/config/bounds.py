"""Units, bounds and choices of settings, and the checks of their values.

`schema` declares each setting with a type, and with a unit, bounds or choices from this module.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from msgspec import Struct

from mlxpool.common.gpus import GPU_ID
from mlxpool.common.paths import expanded


class ConfigError(ValueError):
    """Settings are unknown, of the wrong type or out of bounds. Each problem names its setting."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    @property
    def lines(self) -> list[str]:
        """The lines of the message: the only problem, or a heading and all problems."""
        heading = [f"{len(self.problems)} settings are wrong:"] * (len(self.problems) != 1)
        return [*heading, *self.problems]

    def __str__(self) -> str:
        return "\n  ".join(self.lines)


class Problems:
    """Collects the ConfigErrors of all settings, so that one error reports all of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Adds the problems of a ConfigError that the `with` block raises."""
        try:
            yield
        except ConfigError as error:
            self.found += error.problems

    def check(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if self.found:
            raise ConfigError(*self.found)


# ---- units, bounds and choices of a declaration --------------------------------------------------


class Unit(Enum):
    """The unit of a setting, which determines the forms in which its value may be written."""

    BYTES = "bytes"  # an integer; also text such as "4GB"
    SECONDS = "seconds"  # a float; also text such as "5m"
    IDS = "ids"  # a list of strings or integers, or a single string or integer
    FLAG = "flag"  # a boolean; also the text "true" or "false", for environment variables


class Within(Struct, frozen=True):
    """The bounds of a number, both inclusive."""

    low: float
    high: float

    def __call__(self, value: Any, where: str) -> None:
        if not self.low <= value <= self.high:
            raise ConfigError(
                f"{where} is {value}, must be from {_exact(self.low)} to {_exact(self.high)}"
            )


def _exact(bound: float) -> str:
    """Returns a bound as text with all of its digits: 1048576, not 1.04858e+06."""
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"


class OneOf(Struct, frozen=True):
    """The texts that a setting may have."""

    choices: tuple[str, ...]

    def __call__(self, value: Any, where: str) -> None:
        if value not in self.choices:
            raise ConfigError(f"{where} is {value!r}, must be of {self.choices}")


class Declaration(Struct, frozen=True):
    """The declaration of a setting in `schema`. Each check raises ConfigError."""

    type: Any
    unit: Unit | None
    checks: tuple[Callable[[Any, str], None], ...]

    def read(self, value: Any, where: str) -> Any:
        """Returns the value of a file, a variable or a flag, converted to the setting's type.

        Raises ConfigError naming `where`, the path of the setting.
        """
        read = _convert(self, value, where)
        for check in self.checks:
            check(read, where)
        return read


def declarations(kind: type) -> Mapping[str, Declaration]:
    """Returns the declaration of each setting of a record, by name, in the order of the fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _declaration(hint) for name, hint in hints.items()}


def _declaration(hint: Any) -> Declaration:
    if get_origin(hint) is not Annotated:
        return Declaration(hint, None, ())
    declared, *notes = get_args(hint)
    unit = next((note for note in notes if isinstance(note, Unit)), None)
    return Declaration(declared, unit, tuple(note for note in notes if callable(note)))


# ---- conversion ----------------------------------------------------------------------------------


def _convert(setting: Declaration, value: Any, where: str) -> Any:
    read = _READERS.get(setting.unit)
    if read is not None:
        return read(value, where)
    if setting.unit is Unit.FLAG:
        value = {"true": True, "false": False}.get(value, value)
    if setting.type is int:
        return _int(value, where)
    if setting.type is bool:
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    if get_origin(setting.type) is tuple:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(i, str) for i in items):
            raise ConfigError(f"{where} must be a list of strings, got {value!r}")
        return tuple(items)
    if not isinstance(value, str | Path):
        raise ConfigError(f"{where} must be a string, got {value!r}")
    is_path = setting.type is Path or Path in get_args(setting.type)
    return expanded(value).absolute() if is_path else str(value)


def _int(value: Any, where: str) -> int:
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be an integer, got {value!r}")
    return value


def _ids(value: Any, where: str) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int | str) and not isinstance(item, bool) for item in items):
        raise ConfigError(f"{where} must be a list of numbers or strings, got {value!r}")
    return tuple(map(str, items))


_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def seconds(value: Any, where: str) -> float:
    """Returns a time in seconds, read from a number or from text such as "250ms", "5m", "-1".

    Raises ConfigError if the value is not a time.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(ms|s|m|h)?", str(value).strip())
    if not match or not isinstance(value, str):
        raise ConfigError(f'{where} must be a time such as "5m" or "250ms", got {value!r}')
    return float(match[1]) * _SECONDS[match[2] or "s"]


def size(value: Any, where: str) -> int:
    """Returns a size in bytes, read from a number or from text such as "4GB", "512MiB".

    Raises ConfigError if the value is not a size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if not match or not isinstance(value, str) or match[2].upper() not in _BYTES:
        raise ConfigError(f'{where} must be a size such as "4GB", got {value!r}')
    return int(float(match[1]) * _BYTES[match[2].upper()])


_READERS: Mapping[Unit | None, Callable[[Any, str], Any]] = {
    Unit.SECONDS: seconds,
    Unit.BYTES: size,
    Unit.IDS: _ids,
}


def host_port(text: str, where: str = "pool.metrics") -> tuple[str, int]:
    """Returns the host and port of "127.0.0.1:9464" or "[::1]:9464"; port 0 means any free port.

    Raises ConfigError if the text has another form.
    """
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", text)
    if not match or int(match[3]) > 65535:
        raise ConfigError(f'{where} must be HOST:PORT such as "127.0.0.1:9464", got {text!r}')
    return match[1] or match[2], int(match[3])


LOOPBACK = ("127.0.0.1", "::1", "localhost")  # names of the loopback host
ANY_ORIGIN = "*"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # scheme -> the port that browsers leave out
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")  # as browsers write origins: no path


def origin_faults(origins: Iterable[str]) -> Iterator[str]:
    """Yields an error text for each value that is neither an origin of web pages nor ANY_ORIGIN."""
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            yield (
                f"{origin!r} is no origin: write scheme://host or scheme://host:port in lower case,"
                f" without a path, or {ANY_ORIGIN!r} for all"
            )
        elif (port := DEFAULT_PORTS.get(origin.partition(":")[0])) and origin.endswith(port):
            yield (
                f"{origin!r} would match no page: browsers leave the default port out, so write"
                f" {origin.removesuffix(port)!r}"
            )


def proxy_faults(proxies: Iterable[str]) -> Iterator[str]:
    """Yields an error text for each value that is neither an address nor a network."""
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            yield (
                f"{proxy!r} is no address of a proxy: {error}; write an address such as 127.0.0.1,"
                " or a network such as 10.0.0.0/8"
            )


def check_host_port(value: str, where: str) -> None:
    """Raises ConfigError unless the text is empty or HOST:PORT."""
    if value:
        host_port(value, where)


def check_gpu_ids(ids: Sequence[str], where: str) -> None:
    """Raises ConfigError if a text cannot be the name of a GPU, or if a GPU is named twice."""
    for gpu in ids:
        if not GPU_ID.fullmatch(gpu):
            raise ConfigError(
                f"{where} has {gpu!r:.80}, which is neither a number of a GPU from 0 to 9999 nor a"
                " name that begins with GPU- or MIG-: write them as CUDA_VISIBLE_DEVICES has them,"
                ' such as [0, 1] or ["GPU-8f3c…"]'
            )
        if ids.count(gpu) > 1:
            raise ConfigError(f"{where} has {gpu!r:.80} {ids.count(gpu)} times: name a GPU once")


def check_folder(path: Path, where: str) -> None:
    """Raises ConfigError unless the folder exists."""
    if not path.is_dir():
        raise ConfigError(f"{where}: there is no folder {path}")
