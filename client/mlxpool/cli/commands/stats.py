"""`mlxpool stats`: counters of the broker, in groups and with rates; --watch repeats them."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.cli.admin import ask
from mlxpool.cli.columns import joined
from mlxpool.cli.formatting import count, duration, json_text, milliseconds
from mlxpool.cli.style import ERROR, HEAD, Paint, paint_of, width_of
from mlxpool.common.escapes import escape_line

Answer = Mapping[str, Any]  # of `stats`

RATE_SNAPSHOTS = 3  # a second apart; with --watch rates are an average over them
FIGURE, RATE = 14, 11  # characters of the columns for figures and rates
NAME = 15  # characters of the names, at least
ROOMY = NAME + 3 + FIGURE + RATE  # columns of a terminal; the gaps of a narrower one are smaller
NEXT_KEYS, BACK_KEYS, QUIT_KEYS = " nj", "bpk", "qQ\x03\x04"


class Counter(Struct, frozen=True):
    """A figure of `stats`: its name, and the key of its value, with dots between nested keys."""

    name: str
    key: str
    rate: bool = False  # whether it only grows, so that it has a rate


GROUPS: Mapping[str, tuple[Counter, ...]] = {
    "requests": (
        Counter("accepted", "requests.accepted", rate=True),
        Counter("done", "requests.done", rate=True),
        Counter("failed", "requests.failed", rate=True),
        Counter("cancelled", "requests.cancelled", rate=True),
        Counter("live", "requests.live"),
        Counter("queued", "queued"),
        Counter("resumed", "resumed", rate=True),
        Counter("preempted", "preempted", rate=True),
    ),
    "tokens": (
        Counter("generated", "tokens.generated", rate=True),
        Counter("of prompts", "tokens.prompt", rate=True),
    ),
    "connections": (
        Counter("clients", "links.known"),
        Counter("lost", "links.lost", rate=True),
        Counter("keys refused", "auth_failures", rate=True),
        Counter("bad frames", "frames.bad", rate=True),
        Counter("fenced frames", "frames.fenced", rate=True),
    ),
}
BY_CODE = {"failures": "failed requests, by code", "rejected": "refused requests, by code"}
REFUSED_JOBS = "jobs.refused"  # by code
MEANS = {"queue": "in the queue", "total": "until the end"}  # keys of `seconds`
SHOWN_ABOVE = ("pid", "state", "uptime_s", "run_dir")  # keys of `broker` in the first line


def lines(history: Sequence[Answer], width: int, paint: Paint) -> list[str]:
    """The lines for the newest answer; rates are since the oldest, with one since the start.

    They fit 40 columns unless a figure, a code or a value is very long.
    """
    now, before = history[-1], history[0]
    if len(history) == 1 or before["broker"]["boot"] != now["broker"]["boot"]:
        before = {}
    seconds = now["broker"]["uptime_s"] - (before["broker"]["uptime_s"] if before else 0.0)
    values, old = _flat(now), _flat(before)
    found = _head(now, width)
    for title, counters in GROUPS.items():
        rows = [
            _counter_row(one, values, old, seconds, width) for one in counters if one.key in values
        ]
        if rows:
            found += ["", paint(_row(title, width, "total", "a second"), HEAD), *rows]
        for counter in counters:
            values.pop(counter.key, None)
    found += _means(now, values, width, paint)
    for key, title in BY_CODE.items():
        found += _codes(now.get(key), title, width, paint)
    found += _codes(values.pop(REFUSED_JOBS, None), "refused jobs, batches, files", width, paint)
    known = (*(f"broker.{key}" for key in SHOWN_ABOVE), *BY_CODE)
    rest = {key: one for key, one in values.items() if key not in known}
    rest = {key: one for key, one in rest.items() if key.partition(".")[0] not in BY_CODE}
    if rest.get("conserved") is False:
        lost = "a stream was lost or counted twice: conserved is false"
        found += ["", *(paint(line, ERROR) for line in textwrap.wrap(lost, width))]
    found += ["", paint("other", HEAD)]
    widest = max(NAME, *(len(escape_line(key)) for key in rest)) if rest else NAME
    for key, one in rest.items():
        found += _value_lines(escape_line(key), _plain(one), widest, width)
    return found


def _head(now: Answer, width: int) -> list[str]:
    broker = now["broker"]
    parts = (
        f"broker {broker['pid']} {broker['state']}",
        f"up {duration(broker['uptime_s'])}",
        broker["run_dir"],
    )
    return joined([escape_line(part) for part in parts], width)


def _row(name: str, width: int, figure: str, rate: str = "") -> str:
    missing = max(0, ROOMY - width)
    from_rate = min(missing, RATE - len(" a second"))
    from_figure = min(missing - from_rate, FIGURE - len("total"))
    numbers = f" {figure:>{FIGURE - from_figure}} {rate:>{RATE - from_rate - 1}}"
    return f"{name:<{min(NAME + 2, max(0, width - len(numbers)))}}{numbers}".rstrip()


def _value_lines(key: str, value: str, widest: int, width: int) -> list[str]:
    """A key and its value in one line, in two where they do not fit."""
    aligned, close = f"  {key:<{widest}} {value}", f"  {key} {value}"
    for line in (aligned, close):
        if len(line) <= width:
            return [line]
    return [f"  {key}", f"    {value}"]


def _counter_row(
    counter: Counter,
    values: Mapping[str, Any],
    old: Mapping[str, Any],
    seconds: float,
    width: int,
) -> str:
    value = values[counter.key]
    grown = value - old.get(counter.key, 0)
    rate = _rate(grown / seconds) if counter.rate and seconds > 0 else ""
    return _row(f"  {counter.name}", width, f"{value:,}", rate)


def _means(now: Answer, values: dict[str, Any], width: int, paint: Paint) -> Iterator[str]:
    """Mean times of the requests that have ended; takes their sums out of `values`."""
    counts, sums = now.get("requests", {}), now.get("seconds", {})
    ended = sum(counts.get(key, 0) for key in ("done", "failed", "cancelled"))
    for key in MEANS:
        values.pop(f"seconds.{key}", None)
    if ended and sums:
        yield ""
        yield paint(_row("ended requests", width, "mean"), HEAD)
        for key, name in MEANS.items():
            yield _row(f"  {name}", width, milliseconds(sums.get(key, 0.0) / ended))


def _codes(counts: Any, title: str, width: int, paint: Paint) -> Iterator[str]:
    """A line for each code; none where nothing failed."""
    if isinstance(counts, Mapping) and counts:
        yield ""
        yield paint(title, HEAD)
        for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            yield _row(f"  {escape_line(code)}", width, f"{count:,}")


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _flat(answer: Answer) -> dict[str, Any]:
    """The values of an answer, by keys with dots."""
    found: dict[str, Any] = {}
    for name, value in answer.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            found[name] = value
    return found


def _plain(value: Any) -> str:
    """A value without Python's notation."""
    if isinstance(value, Mapping):
        return escape_line(" ".join(one for many in value.values() for one in many)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return "-" if value is None else escape_line(str(value))


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `stats`."""
    parser = commands.add_parser(
        "stats",
        parents=[common],
        help="show counters since the broker's start, with rates",
        description="Counters since the broker's start, and how much they grow a second: since the"
        f" start, with --watch over {RATE_SNAPSHOTS} s. Keys of --watch: space next page, b page"
        " before, q quit.",
    )
    parser.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    parser.add_argument(
        "--count", type=count, default=0, metavar="N", help="with --watch: end after N snapshots"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the counters; with --watch a page each second."""
    if options.watch:
        return _watch(options)
    answer = ask(options.admin_target, "stats")
    width, paint = width_of(sys.stdout), paint_of(sys.stdout)
    print(json_text(answer) if options.json else "\n".join(lines([answer], width, paint)))
    return 0


class Pages:
    """The page of the newest counters that is shown; keys turn pages."""

    def __init__(self) -> None:
        self.history: deque[Answer] = deque(maxlen=RATE_SNAPSHOTS + 1)
        self.number = 0

    def press(self, keys: str) -> bool:
        """Apply pressed keys; returns False to end."""
        for key in keys:
            if key in QUIT_KEYS:
                return False
            self.number += (key in NEXT_KEYS) - (key in BACK_KEYS)
        return True

    def take(self, snapshot: Mapping[str, Any]) -> None:
        self.history.append(_stats_of(snapshot))

    def page(self, columns: int, height: int, *, keys: bool, paint: Paint) -> str:
        """One page of the counters, with the keys below if there are more; "" before the first."""
        return self.text(lines(list(self.history), columns, paint), height) if self.history else ""

    def text(self, found: list[str], height: int) -> str:
        """The lines of one page, with the keys below them if there are more."""
        if len(found) <= height:
            self.number = 0
            return "\n".join(found)
        room = max(1, height - 1)
        pages = -(-len(found) // room)
        self.number = min(max(0, self.number), pages - 1)
        shown = found[self.number * room : (self.number + 1) * room]
        keys = f"page {self.number + 1} of {pages}: space next, b back, q quit"
        return "\n".join([*shown, *[""] * (room - len(shown)), keys])


def _watch(options: argparse.Namespace) -> int:
    # Here and not above: `stats` alone starts faster without.
    from mlxpool.cli.watch import show_pages, snapshots

    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            print(json_text(_stats_of(snapshot)), flush=True)
        return 0
    show_pages(options.admin_target, options.count, Pages())
    return 0


def _stats_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `stats`, from a snapshot of `watch`."""
    return {"broker": snapshot["broker"], **snapshot["stats"]}
