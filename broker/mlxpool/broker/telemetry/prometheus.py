"""Renders a snapshot in Prometheus's text format.

Not prometheus_client: for nine histograms of each of 50 models it takes far longer, and meanwhile
the broker's loop needs the interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from mlxpool.broker.metrics.histograms import Frozen
from mlxpool.broker.telemetry.metric_table import FAMILIES, Family, Value
from mlxpool.broker.telemetry.snapshot import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusWriter:
    """Caches the text around the numbers, and the text of histograms that have not changed."""

    def __init__(self) -> None:
        # By family, then by the values of its labels: text with a % conversion for each number.
        self._templates: dict[str, dict[tuple[str, ...], bytes]] = {f.name: {} for f in FAMILIES}
        self._written: dict[tuple[str, tuple[str, ...]], tuple[Frozen, bytes]] = {}

    def text(self, snapshot: Snapshot) -> bytes:
        """UTF-8 text of the format 0.0.4."""
        return b"".join(self._parts(snapshot))

    def _parts(self, snapshot: Snapshot) -> Iterator[bytes]:
        for family in FAMILIES:
            yield _head(family)
            templates = self._templates[family.name]
            for labels, value in family.rows(snapshot):
                template = templates.get(labels)
                if template is None:
                    template = templates[labels] = _template(family, labels, value).encode()
                if isinstance(value, Frozen):
                    yield self._histogram((family.name, labels), template, value)
                else:
                    yield template % (tuple(value) if isinstance(value, Sequence) else value)

    def _histogram(self, key: tuple[str, tuple[str, ...]], template: bytes, value: Frozen) -> bytes:
        """The cached text, if the histogram has no new value."""
        before, text = self._written.get(key, (None, b""))
        if before is not value:
            counts = tuple(accumulate(value.counts))
            text = template % (*counts, value.total, counts[-1])
            self._written[key] = (value, text)
        return text


def _head(family: Family) -> bytes:
    return f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n".encode()


def _template(family: Family, labels: tuple[str, ...], value: Value) -> str:
    """One line, a line for each value of the last label, or those of a histogram."""
    name = family.name
    if isinstance(value, Frozen):
        text = _labels(family, labels)
        ends = (*value.bounds, "+Inf")
        buckets = "".join(f'{name}_bucket{{{text},le="{end}"}} %d\n' for end in ends)
        return f"{buckets}{name}_sum{{{text}}} %a\n{name}_count{{{text}}} %d\n"
    if family.last_label_values:
        lines = (_labels(family, (*labels, last)) for last in family.last_label_values)
        return "".join(f"{name}{{{text}}} %a\n" for text in lines)
    return f"{name}{{{_labels(family, labels)}}} %a\n" if labels else f"{name} %a\n"


def _labels(family: Family, values: tuple[str, ...]) -> str:
    """For a template, so with each % doubled."""
    pairs = zip(family.labels, values, strict=True)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value.replace("%", "%%")
