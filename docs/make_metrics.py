"""Makes the tables of docs/metrics.md from the broker's metrics: `python docs/make_metrics.py`.

A test checks that the page is up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mlxpool.broker.telemetry import metric_table
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.common.metrics import HISTOGRAM, Family

PAGE = Path(__file__).parent / "metrics.md"
PART = re.compile(
    r"(<!-- made by docs/make_metrics.py: (\w+) -->\n)(.*?)(<!-- until here -->)", re.S
)
GROUPS = {  # name of the part -> labels of all its families, families
    "models": (("model",), metric_table.MODELS),
    "workers": (("model", "worker"), metric_table.WORKERS),
    "broker": ((), metric_table.BROKER),
}


def table(common: tuple[str, ...], families: Iterable[Family[Snapshot]]) -> str:
    """Returns a row for each metric: name, labels except the common labels, help text."""
    return "| name | is |\n|---|---|\n" + "".join(_row(common, family) for family in families)


def _row(common: tuple[str, ...], family: Family[Snapshot]) -> str:
    assert family.labels[: len(common)] == common, family.name
    further = ", ".join(family.labels[len(common) :])
    text = family.help
    if family.kind == HISTOGRAM:
        text = f"histogram: {text[0].lower()}{text[1:]}"
    return f"| `{family.name}`{further and f' {{{further}}}'} | {text} |\n"


def page() -> str:
    """Returns the page with its tables made anew."""
    return PART.sub(
        lambda part: f"{part[1]}{table(*GROUPS[part[2]])}{part[4]}", PAGE.read_text("utf-8")
    )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
