"""The origin of each setting: a flag, a variable, a line of the file, or the default.

`loading.load` chooses the values. This module repeats the order of precedence only to name origins.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import nearest
from mlxpool.common.config.loading import load, variables
from mlxpool.common.config.schema import BUILTIN, NO_SETTINGS, ModelConfig, PoolConfig
from mlxpool.common.records import as_map

DEFAULT = "default"
PREFIX = "MLXPOOL_"
# Variables of the command line, of workers and of tests, which are not settings.
OTHER_VARIABLES = [
    "MLXPOOL_ADMIN_ENDPOINT",
    "MLXPOOL_BACK_ENDPOINT",
    "MLXPOOL_BENCH",
    "MLXPOOL_CONFIG",
    "MLXPOOL_ENDPOINT",
    "MLXPOOL_FRESH_TMPDIR",
    "MLXPOOL_GATEWAY",
    "MLXPOOL_HISTORY",
    "MLXPOOL_HYPOTHESIS",
    "MLXPOOL_KEY",
    "MLXPOOL_OPENBLAS",
    "MLXPOOL_SERVER_KEY",
    "MLXPOOL_TESTS_TMPDIR",
    "MLXPOOL_WORKER",
]


class Setting(Struct, frozen=True):
    """A setting with its origin; `key` is dotted: pool.queue_limit, models.demo.path."""

    key: str
    value: Any
    origin: str


def settings(
    path: Path | None, flags: Mapping[str, Any], folders: Mapping[str, str]
) -> list[Setting]:
    """Returns all settings of a pool with their origins.

    The arguments are those of `loading.load`, which reads the settings. Raises ConfigError for
    settings that cannot be read or are wrong.
    """
    loaded = load(path, flags, folders)
    lines = _lines(path.read_text("utf-8")) if path else {}
    table = tomllib.loads(path.read_text("utf-8")) if path else {}
    source = _SourceFile(str(path), table, lines)
    return [
        *_pool(loaded, flags, source),
        *_entries(loaded, source),
        *(setting for name in loaded.models for setting in _model(loaded, name, folders, source)),
    ]


class _SourceFile(Struct, frozen=True):
    """The table of a settings file, and the line number of each key."""

    file: str
    table: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def origin(self, *keys: str) -> str | None:
        """Returns FILE:LINE of a key; None if the file does not have the key."""
        inner: Any = self.table
        for key in keys:
            if not isinstance(inner, Mapping) or key not in inner:
                return None
            inner = inner[key]
        for size in range(len(keys), 0, -1):  # a key in an inline table has the line of the table
            if keys[:size] in self.lines:
                return f"{self.file}:{self.lines[keys[:size]]}"
        return self.file


def _pool(loaded: PoolConfig, flags: Mapping[str, Any], source: _SourceFile) -> Iterator[Setting]:
    known = variables()
    for name in (name for name in loaded.__struct_fields__ if name not in NO_SETTINGS):
        if flags.get(name) is not None:
            origin = f"--{name.replace('_', '-')}"
        elif name in known and os.environ.get(known[name]):
            origin = f"${known[name]}"
        else:
            origin = source.origin("pool", name) or DEFAULT
        yield Setting(f"pool.{name}", _plain(getattr(loaded, name)), origin)


def _entries(loaded: PoolConfig, source: _SourceFile) -> Iterator[Setting]:
    """Yields the settings of sections with a name, such as [keys.NAME], except [models.NAME]."""
    for name in (name for name in loaded.__struct_fields__ if name != "models"):
        entries = getattr(loaded, name)
        if not isinstance(entries, Mapping):
            continue
        for entry, table in entries.items():
            for key, value in _flat(as_map(table)):
                origin = source.origin(name, entry, *key) or DEFAULT
                yield Setting(_dotted(name, entry, *key), _plain(value), origin)


def _model(
    loaded: PoolConfig, name: str, folders: Mapping[str, str], source: _SourceFile
) -> Iterator[Setting]:
    model = loaded.models[name]
    if name in folders:
        origin = "--model"
    elif model.within:
        origin = "models_dir"
    else:
        origin = DEFAULT
    from_file = name not in folders  # --model replaces the whole section
    table = as_map(model)
    if model.scaling.max:
        table["replicas"] = table["scaling"]
    for key, value in _flat(table):
        in_file = source.origin("models", name, *key) if from_file else None
        if in_file is None and key == ("keep_alive",) and model.pin:
            in_file = source.origin("models", name, "pin")
        otherwise = origin if key == ("path",) or name in BUILTIN else DEFAULT
        yield Setting(_dotted("models", name, *key), _plain(value), in_file or otherwise)


def _flat(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for key, value in table.items():
        if key in NO_SETTINGS:
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, (*above, key))
        else:
            yield (*above, key), value


def _plain(value: Any) -> Any:
    """Returns a value as a type that JSON has."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _dotted(*keys: str) -> str:
    return ".".join(key if re.fullmatch(r"[\w-]+", key) else f'"{key}"' for key in keys)


_SECTION = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Returns the line number of each section heading, and of each key at the start of a line."""
    numbers: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if (match := _SECTION.match(line)) is not None:
            section = _parts(match[1])
            numbers.setdefault(section, number)
        elif (match := _KEY.match(line)) is not None:
            numbers.setdefault((*section, *_parts(match[1])), number)
    return numbers


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(text))


def unread_variables() -> dict[str, str]:
    """Returns unknown environment variables MLXPOOL_*, each with the most similar known variable.

    The value is "" if no known variable is similar.
    """
    known = [*variables().values(), *OTHER_VARIABLES]
    odd = [n for n in os.environ if n.startswith(PREFIX) and n not in known]
    tails = {
        name.removeprefix(PREFIX): name for name in known
    }  # without the prefix: the common prefix would make all names similar
    near = {name: nearest(name.removeprefix(PREFIX), tails) for name in sorted(odd)}
    return {name: tails.get(tail or "", "") for name, tail in near.items()}


def missing_paths(loaded: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Returns the models' paths that do not exist on this machine, by model name.

    Only paths that begin with "/" or "." are checked.
    """
    return {
        name: model.path
        for name, model in loaded.items()
        if model.path.startswith(("/", ".")) and not Path(model.path).exists()
    }
