"""What every measurement here shares: spread, the machine's line, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("mlxpool", "mlx", "mlx-lm", "pyzmq", "msgpack", "tokenizers")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (minimum - maximum)`."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def machine() -> str:
    """Cores, architecture, Python."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()},"
        f" Python {platform.python_version()}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """The figures as JSON, beside versions and machine."""
    if path is not None:
        whole = {"versions": versions(), "machine": machine(), **figures}
        path.write_text(json.dumps(whole, indent=1) + "\n")
