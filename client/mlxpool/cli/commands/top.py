"""`mlxpool top`: a live view of the pool, computed from the snapshots of the last minute.

Times are the broker's own (`uptime_s`), so rates are also right if the reader is slow.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from mlxpool.cli.columns import Column, joined
from mlxpool.cli.formatting import count, duration, jobs_line, json_text, milliseconds, share, size
from mlxpool.cli.style import NOTE, Paint, plain, table_lines
from mlxpool.common.escapes import escape_line

Snapshot = Mapping[str, Any]

RATE_SNAPSHOTS = 3  # seconds over which tokens per second are averaged
MAX_SNAPSHOTS = 61  # snapshots of a minute, for the median time to the first token

COLUMNS = (
    Column("SLOT", 0, "text"),
    Column("STATE", 0),
    Column("RUN", 2, right=True),
    Column("WAIT", 3, right=True),
    Column("TOK/S", 1, right=True),
    Column("TTFT", 5, right=True),
    Column("KV%", 6, right=True),
    Column("MEM", 4, right=True),
    Column("DRAFTS", 9, right=True),
    Column("RESTARTS", 8, right=True),
    Column("UP", 7, right=True),
)


class Row(Struct, frozen=True):
    """A table row: a slot, or a model without workers. A value is None if it is unknown."""

    model: str
    slot: str = "-"
    state: str = "-"
    running: int = 0
    waiting: int = 0  # number of requests in the queue of the model
    rate: float | None = None  # tokens a second
    first_token: float | None = None  # median seconds to the first token of the model
    kv: float | None = None  # used fraction of the memory for the KV cache, 0 to 1
    memory: int | None = None  # bytes of weights, KV cache, prefixes and steps
    acceptance: float | None = None  # fraction of accepted draft tokens, 0 to 1
    restarts: int = 0
    up: float | None = None  # seconds

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class SortOrder(Struct, frozen=True):
    """A column by which the table can be sorted. `descending`: the largest value comes first."""

    key: str  # the key to press
    name: str  # the column's name in --sort
    value: Callable[[Row], Any]
    descending: bool = True


SORT_ORDERS = (
    SortOrder("m", "model", lambda row: (row.model, row.slot), descending=False),
    SortOrder("e", "state", lambda row: row.state, descending=False),
    SortOrder("n", "run", lambda row: row.running),
    SortOrder("w", "wait", lambda row: row.waiting),
    SortOrder("t", "rate", lambda row: row.rate or 0.0),
    SortOrder("f", "ttft", lambda row: row.first_token or 0.0),
    SortOrder("k", "kv", lambda row: row.kv or 0.0),
    SortOrder("b", "memory", lambda row: row.memory or 0),
    SortOrder("d", "drafts", lambda row: row.acceptance or 0.0),
    SortOrder("x", "restarts", lambda row: row.restarts),
    SortOrder("u", "up", lambda row: row.up or 0.0),
)
KEYS = (
    "q quit",
    "s next column",
    "r reverse",
    *(f"{order.key} {order.name}" for order in SORT_ORDERS),
)


def rows(history: Sequence[Snapshot]) -> list[Row]:
    """Returns the table rows of the newest snapshot in `history`, which has the oldest first."""
    history = _of_one_broker(history)
    now, before = history[-1], history[-1 - min(RATE_SNAPSHOTS, len(history) - 1)]
    models = {model["name"]: model for model in now["models"]}
    tokens_before = {_incarnation(worker): worker.get("tokens", 0) for worker in before["workers"]}
    seconds = now["broker"]["uptime_s"] - before["broker"]["uptime_s"]
    medians = _medians(history[0], now)
    began = {_incarnation(worker): worker for worker in history[0]["workers"]}
    result = []
    for worker in now["workers"]:
        model = models.pop(worker["model"], None) or _model(now, worker["model"])
        grown = worker.get("tokens", 0) - tokens_before.get(_incarnation(worker), 0)
        rate = grown / seconds if seconds > 0 and worker.get("pid") else None
        earlier = began.get(_incarnation(worker)) if history[0] is not now else None
        drafts = _acceptance(earlier or {}, worker)
        result.append(_row(worker, model, rate, medians.get(worker["model"]), drafts))
    for name, model in models.items():
        result.append(
            Row(name, state=model["state"], waiting=model["waiting"], first_token=medians.get(name))
        )
    return result


def ordered(unsorted: Sequence[Row], order: SortOrder, *, reverse: bool = False) -> list[Row]:
    """Returns rows sorted by one column; equal rows are sorted by model and slot."""
    by_name = sorted(unsorted, key=lambda row: (row.model, row.slot))
    return sorted(by_name, key=order.value, reverse=order.descending is not reverse)


def cells(row: Row) -> tuple[str, ...]:
    """Returns the table cells of a row, for COLUMNS. A model without workers has no slot."""
    return (
        row.model if row.slot == "-" else row.slot,
        row.state,
        str(row.running),
        str(row.waiting),
        _figure(row.rate, "{:.0f}"),
        "-" if row.first_token is None else milliseconds(row.first_token),
        _figure(None if row.kv is None else 100 * row.kv, "{:.0f}"),
        size(row.memory),
        share(row.acceptance),
        str(row.restarts),
        "-" if row.up is None else duration(row.up),
    )


def summary(history: Sequence[Snapshot]) -> list[str]:
    """Returns the parts of the line about the whole pool."""
    history = _of_one_broker(history)
    now, before = history[-1], history[-1 - min(RATE_SNAPSHOTS, len(history) - 1)]
    broker, counts = now["broker"], now["stats"]["requests"]
    seconds = broker["uptime_s"] - before["broker"]["uptime_s"]
    generated = now["stats"]["tokens"]["generated"] - before["stats"]["tokens"]["generated"]
    rate = f"{generated / seconds:.0f}" if seconds > 0 else "-"
    return [
        f"broker {broker['pid']} {broker['state']}",
        f"up {duration(broker['uptime_s'])}",
        f"{rate} tokens/s",
        f"{counts['live']} live",
        f"{now['stats']['queued']} queued",
        f"{counts['done']} done",
        f"{counts['failed']} failed",
        f"{counts['cancelled']} cancelled",
        *jobs_line(now.get("jobs")),
    ]


def median(bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Returns the median of a histogram, interpolated inside its bucket; None if it is empty."""
    half, below, low = sum(counts) / 2, 0, 0.0
    if not half:
        return None
    for bound, samples in zip(bounds, counts, strict=False):
        if below + samples >= half:
            return low + (bound - low) * (half - below) / samples
        below, low = below + samples, bound
    return low  # the median is above the last bound


def _medians(before: Snapshot, now: Snapshot) -> dict[str, float | None]:
    """Returns the median seconds to the first token of requests between two snapshots, by model.

    If `before` and `now` are the same snapshot, all requests since the broker's start are counted.
    """
    models = () if before is now else before["models"]
    old = {model["name"]: model["first_token"]["counts"] for model in models}
    medians = {}
    for model in now["models"]:
        counts = model["first_token"]["counts"]
        known = old.get(model["name"], [0] * len(counts))
        grown = [new - was for new, was in zip(counts, known, strict=True)]
        medians[model["name"]] = median(model["first_token"]["bounds"], grown)
    return medians


def _of_one_broker(history: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Returns the snapshots of the newest broker process; counters of each process begin at 0."""
    boot = history[-1]["broker"]["boot"]
    return [snapshot for snapshot in history if snapshot["broker"]["boot"] == boot]


def _incarnation(worker: Mapping[str, Any]) -> tuple[str, Any]:
    return worker["slot"], worker.get("pid")


def _model(snapshot: Snapshot, name: str) -> Mapping[str, Any]:
    """Returns a model by its name; {} if the snapshot lacks the model."""
    return next((m for m in snapshot["models"] if m["name"] == name), {})


def _row(
    worker: Mapping[str, Any],
    model: Mapping[str, Any],
    rate: float | None,
    first_token: float | None,
    acceptance: float | None,
) -> Row:
    memory = worker.get("memory") or {}
    available = memory.get("limit", 0) - memory.get("weights", 0)
    used = memory.get("kv_used", memory.get("kv"))
    return Row(
        model=worker["model"],
        slot=worker["slot"],
        state="suspect" if worker.get("suspect") else worker["state"],
        running=worker.get("running", 0),
        waiting=model.get("waiting", 0),
        rate=rate,
        first_token=first_token,
        kv=used / available if available > 0 and used is not None else None,
        memory=memory.get("total", memory.get("active")),
        acceptance=acceptance,
        restarts=worker.get("restarts", 0),
        up=worker.get("uptime_s"),
    )


def _acceptance(before: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Returns the accepted fraction of a worker's draft tokens between two snapshots.

    Returns None if the worker made no draft tokens between them.
    """
    old, new = (row.get("speculation") or {} for row in (before, now))
    drafted, accepted = (new.get(key, 0) - old.get(key, 0) for key in ("drafted", "accepted"))
    return accepted / drafted if drafted > 0 else None


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `top`."""
    parser = commands.add_parser(
        "top",
        parents=[common],
        help="show workers and their work, live",
        description="Shows a snapshot each second. RUN: requests that a worker computes; WAIT:"
        " requests in the queue of its model; TOK/S: tokens a second, over three seconds; TTFT:"
        " median time to the first token; KV%: share that running requests use of the memory left"
        f" by the weights; DRAFTS: share of accepted draft tokens. Keys: {', '.join(KEYS)}.",
    )
    columns = [order.name for order in SORT_ORDERS]
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        choices=columns,
        default=columns[0],
        help=f"first column to sort by: {', '.join(columns)} (default: %(default)s)",
    )
    parser.add_argument(
        "--count",
        type=count,
        default=0,
        metavar="N",
        help="end after N snapshots (default: do not end)",
    )
    parser.set_defaults(run=run)


class View:
    """The snapshots of the last minute, and the sort order, which the user changes with keys."""

    def __init__(self, sort: str) -> None:
        self.history: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self.order = next(order for order in SORT_ORDERS if order.name == sort)
        self.reversed = False

    def take(self, snapshot: Snapshot) -> None:
        self.history.append(snapshot)

    def press(self, keys: str) -> bool:
        """Applies pressed keys. Returns False to end."""
        for key in keys:
            if key in "qQ\x03\x04":
                return False
            if key == "s":
                self._sort(SORT_ORDERS[(SORT_ORDERS.index(self.order) + 1) % len(SORT_ORDERS)])
            elif key == "r":
                self.reversed = not self.reversed
            else:
                self._sort(next((order for order in SORT_ORDERS if order.key == key), self.order))
        return True

    def _sort(self, order: SortOrder) -> None:
        if order != self.order:
            self.order, self.reversed = order, False

    def rows(self) -> list[Row]:
        return ordered(rows(self.history), self.order, reverse=self.reversed)

    def page(self, columns: int, height: int, *, keys: bool, paint: Paint = plain) -> str:
        """Returns the page: up to `height` lines of `columns` characters. `keys` adds a legend."""
        if not self.history:
            return "waiting for the broker's first snapshot"
        arrow = "falling" if self.order.descending is not self.reversed else "rising"
        parts = [escape_line(part) for part in summary(self.history)]
        head = joined([*parts, f"sorted by {self.order.name}, {arrow}"], columns)
        shown = self.rows()[: max(1, height - len(head) - 1 - keys)]
        body = table_lines(COLUMNS, [cells(row) for row in shown], columns, paint)
        below = [paint(joined(KEYS, columns)[0].removesuffix(","), NOTE)] if keys else []
        return "\n".join([*head, *body, *below])


def run(options: argparse.Namespace) -> int:
    """Shows a page for each snapshot until `q`, Ctrl-C or the last snapshot of --count."""
    # Imported here, so that other commands start faster.
    from mlxpool.cli.watch import show_pages, snapshots

    view = View(options.sort)
    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            view.take(snapshot)
            print(json_text(as_json(view)), flush=True)
        return 0
    show_pages(options.admin_target, options.count, view)
    return 0


def as_json(view: View) -> dict[str, Any]:
    """Returns one line of `top --json`."""
    newest = view.history[-1]
    return {
        "uptime_s": newest["broker"]["uptime_s"],
        "requests": newest["stats"]["requests"],
        "queued": newest["stats"]["queued"],
        "rows": [row.as_json() for row in view.rows()],
    }
