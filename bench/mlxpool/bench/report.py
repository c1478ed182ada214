"""Renders figures as Markdown tables, and saves them as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from mlxpool.bench.measurement import OURS, Figures, Measurement

PACKAGES = ("mlxpool", "mlx", "mlx-lm", "pyzmq", "msgpack", "tokenizers")


def versions() -> str:
    """Returns the versions of the relevant installed packages."""
    known = []
    for name in PACKAGES:
        try:
            known.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(known)


def machine() -> str:
    """Returns cores, architecture, system, Python, and the GPU if MLX uses one."""
    description = (
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()},"
        f" Python {platform.python_version()}"
    )
    try:
        import mlx.core as mx
    except ImportError:
        return f"{description}; no MLX"
    if mx.default_device().type == mx.DeviceType.cpu:
        blas = "preloaded" if "blas" in os.environ.get("LD_PRELOAD", "") else "not preloaded"
        return f"{description}; no GPU; OpenBLAS {blas}"
    return f"{description}; {mx.device_info().get('device_name', 'a GPU')}"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Returns `median (minimum - maximum)`; a single value without the brackets."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} - {max(values):,.{digits}f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(figures: Figures) -> str:
    """Returns figures as Markdown: the command, its conditions, and a table for each group."""
    parts = [
        f"```sh\n{figures.command}\n```",
        f"{figures.about}\n{_conditions(figures)}.{_how_to_read(figures.lines)}",
        *map(_table_of, grouped(figures.lines)),
    ]
    return "\n\n".join(parts) + "\n"


def _conditions(figures: Figures) -> str:
    commit = f"commit {figures.commit}" if figures.commit else ""
    day = day_of(figures.date) if figures.date else ""
    return "; ".join(filter(None, (day, commit, figures.versions, figures.machine)))


def _how_to_read(lines: Sequence[Measurement]) -> str:
    """Returns a sentence that explains the cells; empty if there was one round."""
    if all(len(values) == 1 for line in lines for values in line.sides.values()):
        return ""
    return "\nMedian (minimum - maximum); a ratio is that of one round, above 1 is better."


def day_of(date: str) -> str:
    """Returns `28 November 2026` for 2026-11-28.

    Raises ValueError for a text that is not a date.
    """
    day = datetime.date.fromisoformat(date)
    return f"{day.day} {day:%B %Y}"


def today() -> str:
    """Returns the present date, for the figures of a run that ends now."""
    return datetime.date.today().isoformat()


def grouped(lines: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """Yields the measurements of each table, in the order of their first row."""
    order = list(dict.fromkeys(line.group for line in lines))
    by_table = sorted(lines, key=lambda line: order.index(line.group))
    for _, table_lines in groupby(by_table, key=lambda line: line.group):
        yield list(table_lines)


def _table_of(lines: Sequence[Measurement]) -> str:
    sides = list(dict.fromkeys(side for line in lines for side in line.sides))
    compared = any(line.ratios() for line in lines)
    mixed = len({line.unit for line in lines}) > 1
    title = lines[0].group if mixed else f"{lines[0].group}, {lines[0].unit}"
    head = [title, *sides, *(["ratio"] if compared else [])]
    rows = [_row(line, sides, compared=compared, unit=mixed) for line in lines]
    notes = dict.fromkeys(line.note for line in lines if line.note)
    return "\n\n".join([table(head, rows), *notes])


def _row(line: Measurement, sides: Sequence[str], *, compared: bool, unit: bool) -> list[str]:
    cells = [spread(line.sides[side], line.digits) if side in line.sides else "" for side in sides]
    ratios = line.ratios()
    last = [f"**{spread(ratios, 2)}**" if ratios else ""] if compared else []
    name = f"{line.name}, {line.unit}" if unit and line.unit else line.name
    return [name, *cells, *last]


def short(line: Measurement) -> str:
    """Returns a measurement in one line, for the terminal."""
    sides = ", ".join(
        f"{side} {spread(values, line.digits)}" for side, values in line.sides.items()
    )
    ratios = line.ratios()
    ending = f"; ratio {spread(ratios, 2)}" if ratios and OURS in line.sides else ""
    return f"{line.group}, {line.name}: {sides} {line.unit}{ending}"


def write(file: Path, figures: Figures) -> None:
    """Writes the figures as JSON."""
    file.write_text(json.dumps(figures.as_json(), indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> Figures:
    """Reads the figures of `write`. Raises ValueError for any other file."""
    try:
        return Figures.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} has no figures of `mlxpool bench --out`: {error}") from error


def save(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures of a chaos test as JSON, with versions and machine, if there is a path."""
    if path is not None:
        run = {"versions": versions(), "machine": machine(), **figures}
        path.write_text(json.dumps(run, indent=1) + "\n")
