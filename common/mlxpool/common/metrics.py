"""Metric families, histograms, and their text for Prometheus. Used by broker and gateway.

This module replaces prometheus_client, which takes far longer for a pool of 50 models, each with
nine histograms. prometheus_client would also hold the interpreter's lock, which the broker's loop
needs, while it renders the text.
"""

from __future__ import annotations

import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    import psutil

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"

Source = TypeVar("Source")


class Histogram:
    """Counts of values by bucket: `counts[i]` counts values above bound i - 1, up to bound i."""

    __slots__ = ("_frozen", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last entry counts values above every bound
        self.total = 0.0
        self._frozen: Frozen | None = None  # a copy of the present values, if one was made

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        self._frozen = None

    def frozen(self) -> Frozen:
        """Returns a copy that other threads may read; the same copy until the next `observe`."""
        if self._frozen is None:
            self._frozen = Frozen(self.bounds, tuple(self.counts), self.total)
        return self._frozen


class Frozen(Struct, frozen=True):
    """A copy of a histogram, which does not change."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


Value = float | Sequence[float] | Frozen
Rows = Iterable[tuple[tuple[str, ...], Value]]  # values of the labels, and the metric's value


class Family(Struct, Generic[Source], frozen=True):
    """A metric family. `rows` makes the rows of the family from a source, such as a snapshot.

    A row has the values of the labels and the value of the metric. With `last_label_values`, a row
    has no value of the last label, and its metric value is a list of numbers. Each number then
    belongs to the value in `last_label_values` with the same index.
    """

    name: str
    kind: str  # GAUGE | COUNTER | HISTOGRAM
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Source], Rows]
    last_label_values: tuple[str, ...] = ()

    def series(self) -> tuple[str, ...]:
        """Returns the names of the family's series, which a query may use."""
        if self.kind != HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{end}" for end in ("bucket", "sum", "count"))


class MetricsWriter(Generic[Source]):
    """Renders metrics as text. Caches the text around the numbers, and unchanged histograms."""

    def __init__(self, families: Sequence[Family[Source]]) -> None:
        self._families = families
        # Texts with a % conversion for each number, by family name and by label values.
        self._templates: dict[str, dict[tuple[str, ...], bytes]] = {f.name: {} for f in families}
        self._written: dict[tuple[str, tuple[str, ...]], tuple[Frozen, bytes]] = {}

    def text(self, source: Source, accept: str = "") -> tuple[bytes, str]:
        """Returns text and content type: OpenMetrics if `accept`, the header Accept, names it."""
        if OPENMETRICS not in accept:
            return b"".join(self._parts(source, False)), CONTENT_TYPE
        text = b"".join((*self._parts(source, True), b"# EOF\n"))
        return text, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"

    def _parts(self, source: Source, openmetrics: bool) -> Iterator[bytes]:
        for family in self._families:
            yield _head(family, family.name.removesuffix("_total") if openmetrics else family.name)
            templates = self._templates[family.name]
            for labels, value in family.rows(source):
                template = templates.get(labels)
                if template is None:
                    template = templates[labels] = _template(family, labels, value).encode()
                if isinstance(value, Frozen):
                    yield self._histogram((family.name, labels), template, value)
                else:
                    yield template % (tuple(value) if isinstance(value, Sequence) else value)

    def _histogram(self, key: tuple[str, tuple[str, ...]], template: bytes, value: Frozen) -> bytes:
        """Returns the text of a histogram; the cached text if the histogram has no new value."""
        before, text = self._written.get(key, (None, b""))
        if before is not value:
            counts = tuple(accumulate(value.counts))
            text = template % (*counts, value.total, counts[-1])
            self._written[key] = (value, text)
        return text


def _head(family: Family[Any], name: str) -> bytes:
    return f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n".encode()


def _template(family: Family[Any], labels: tuple[str, ...], value: Value) -> str:
    """Returns the text of a row, in which each number is a %-placeholder.

    A row is one line, a line for each value of the last label, or all lines of a histogram.
    """
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


def _labels(family: Family[Any], values: tuple[str, ...]) -> str:
    """Returns the text of labels for a template, in which each % is doubled."""
    pairs = zip(family.labels, values, strict=True)
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)


def _escaped(value: str) -> str:
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value.replace("%", "%%")


def _process(value: Callable[[psutil.Process], float]) -> Callable[[object], Rows]:
    def rows(source: object) -> Rows:
        import psutil  # imported here: the client does not depend on psutil

        return [((), value(psutil.Process()))]

    return rows


# The metric families of the current process.
PROCESS: tuple[Family[Any], ...] = (
    Family("process_virtual_memory_bytes", GAUGE, "Virtual memory of the process in bytes",
           (), _process(lambda process: process.memory_info().vms)),
    Family("process_resident_memory_bytes", GAUGE, "Resident memory of the process in bytes",
           (), _process(lambda process: process.memory_info().rss)),
    Family("process_start_time_seconds", GAUGE, "Start of the process in seconds since 1970",
           (), _process(lambda process: process.create_time())),
    Family("process_cpu_seconds_total", COUNTER, "Processor time of the process in seconds",
           (), _process(lambda process: sum(process.cpu_times()[:2]))),
    Family("process_open_fds", GAUGE, "Number of open file descriptors",
           (), _process(lambda process: process.num_fds())),
    Family("process_max_fds", GAUGE, "Bound of the number of open file descriptors",
           (), lambda source: [((), resource.getrlimit(resource.RLIMIT_NOFILE)[0])]),
)  # fmt: skip
