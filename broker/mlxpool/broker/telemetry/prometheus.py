"""Snapshots to Prometheus's text format.

The writer is ours: for nine histograms of each of 50 models prometheus_client takes far longer, and
meanwhile the broker's loop wants the interpreter (bench/scrape_cost.py measures both).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from mlxpool.broker.metrics.histograms import Frozen
from mlxpool.broker.telemetry.metric_table import FAMILIES, Family, Value
from mlxpool.broker.telemetry.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Writer:
    """Snapshots to text. Keeps what stays: the text around the figures, and idle histograms."""

    def __init__(self) -> None:
        # By family, then by the values of its labels: the text with places for the figures.
        self._shapes: dict[str, dict[tuple[str, ...], bytes]] = {f.name: {} for f in FAMILIES}
        self._written: dict[tuple[str, tuple[str, ...]], tuple[Frozen, bytes]] = {}

    def text(self, snapshot: Snapshot) -> bytes:
        """The format 0.0.4."""
        return b"".join(self._parts(snapshot))

    def _parts(self, snapshot: Snapshot) -> Iterator[bytes]:
        for family in FAMILIES:
            yield _head(family)
            shapes = self._shapes[family.name]
            for labels, value in family.rows(snapshot):
                shape = shapes.get(labels)
                if shape is None:
                    shape = shapes[labels] = _shape(family, labels, value).encode()
                if isinstance(value, Frozen):
                    yield self._histogram((family.name, labels), shape, value)
                else:
                    yield shape % (tuple(value) if isinstance(value, Sequence) else value)

    def _histogram(self, key: tuple[str, tuple[str, ...]], shape: bytes, value: Frozen) -> bytes:
        """As it was written last, if nothing new came."""
        before, text = self._written.get(key, (None, b""))
        if before is not value:
            counts = tuple(accumulate(value.counts))
            text = shape % (*counts, value.total, counts[-1])
            self._written[key] = (value, text)
        return text


def _head(family: Family) -> bytes:
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()


def _shape(family: Family, labels: tuple[str, ...], value: Value) -> str:
    """A line; one for each value of the last label; or a histogram's counts, sum and count."""
    name = family.name
    if isinstance(value, Frozen):
        text = _labels(family, labels)
        ends = (*value.bounds, "+Inf")
        buckets = "".join(f'{name}_bucket{{{text},le="{end}"}} %d\n' for end in ends)
        return f"{buckets}{name}_sum{{{text}}} %a\n{name}_count{{{text}}} %d\n"
    if family.over:
        lines = (_labels(family, (*labels, last)) for last in family.over)
        return "".join(f"{name}{{{text}}} %a\n" for text in lines)
    return f"{name}{{{_labels(family, labels)}}} %a\n" if labels else f"{name} %a\n"


def _labels(family: Family, values: tuple[str, ...]) -> str:
    """As they stand in a shape, so with each % doubled."""
    pairs = zip(family.labels, values, strict=True)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value.replace("%", "%%")
