"""`mlxpool stats`: the broker's counters, in groups and with rates; --watch repeats the output."""

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

Answer = Mapping[str, Any]  # an answer to `stats`

RATE_SNAPSHOTS = 3  # --watch averages rates over this many seconds
FIGURE, RATE = 14, 11  # width of the columns for numbers and rates, in characters
NAME = 15  # the least width of the column for names, in characters
ROOMY = NAME + 3 + FIGURE + RATE  # characters of a terminal; a narrower one has smaller gaps
NEXT_KEYS, BACK_KEYS, QUIT_KEYS = " nj", "bpk", "qQ\x03\x04"


class Counter(Struct, frozen=True):
    """A number in `stats`: its name, and its key, with dots between nested keys."""

    name: str
    key: str
    rate: bool = False  # True if the number only grows, so that its rate is shown


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
REFUSED_JOBS = "jobs.refused"  # key of a map with a count for each code
MEANS = {"queue": "in the queue", "total": "until the end"}  # keys of `seconds`
SHOWN_ABOVE = ("pid", "state", "uptime_s", "run_dir")  # keys of `broker` in the first line


def lines(history: Sequence[Answer], width: int, paint: Paint) -> list[str]:
    """Returns the lines for the newest answer. Rates are for the time since the oldest answer.

    With a single answer, or after a restart of the broker, rates are for the time since the
    broker's start. The lines fit 40 columns unless a number, a code or a value is very long.
    """
    now, before = history[-1], history[0]
    if len(history) == 1 or before["broker"]["boot"] != now["broker"]["boot"]:
        before = {}
    seconds = now["broker"]["uptime_s"] - (before["broker"]["uptime_s"] if before else 0.0)
    values, old = _flat(now), _flat(before)
    text = _head(now, width)
    for title, counters in GROUPS.items():
        rows = [
            _counter_row(counter, values, old, seconds, width)
            for counter in counters
            if counter.key in values
        ]
        if rows:
            text += ["", paint(_row(title, width, "total", "a second"), HEAD), *rows]
        for counter in counters:
            values.pop(counter.key, None)
    text += _means(now, values, width, paint)
    for key, title in BY_CODE.items():
        text += _codes(now.get(key), title, width, paint)
    text += _codes(values.pop(REFUSED_JOBS, None), "refused jobs, batches, files", width, paint)
    known = (*(f"broker.{key}" for key in SHOWN_ABOVE), *BY_CODE)
    rest = {key: value for key, value in values.items() if key not in known}
    rest = {key: value for key, value in rest.items() if key.partition(".")[0] not in BY_CODE}
    if rest.get("conserved") is False:
        lost = "a stream was lost or counted twice: conserved is false"
        text += ["", *(paint(line, ERROR) for line in textwrap.wrap(lost, width))]
    text += ["", paint("other", HEAD)]
    widest = max(NAME, *(len(escape_line(key)) for key in rest)) if rest else NAME
    for key, value in rest.items():
        text += _value_lines(escape_line(key), _plain(value), widest, width)
    return text


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
    """Returns the line of a key and its value, or two lines if they do not fit into one."""
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
    """Yields lines with the mean times of ended requests.

    Removes the summed times from `values`, so that they are not shown as well.
    """
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
    """Yields a heading and a line for each code; nothing if all counts are 0."""
    if isinstance(counts, Mapping) and counts:
        yield ""
        yield paint(title, HEAD)
        for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            yield _row(f"  {escape_line(code)}", width, f"{count:,}")


def _rate(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _flat(answer: Answer) -> dict[str, Any]:
    """Returns the values of an answer by key, with dots between nested keys."""
    values: dict[str, Any] = {}
    for name, value in answer.items():
        if isinstance(value, Mapping):
            values |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            values[name] = value
    return values


def _plain(value: Any) -> str:
    """Returns a value as text, without Python's notation."""
    if isinstance(value, Mapping):
        return escape_line(" ".join(word for words in value.values() for word in words)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return "-" if value is None else escape_line(str(value))


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `stats`."""
    parser = commands.add_parser(
        "stats",
        parents=[common],
        help="show counters since the broker's start, with rates",
        description="Shows counters since the broker's start, and their growth a second: since the"
        f" start, with --watch over {RATE_SNAPSHOTS} s. Keys of --watch: space next page, b page"
        " before, q quit.",
    )
    parser.add_argument("--watch", action="store_true", help="repeat each second, until Ctrl-C")
    parser.add_argument(
        "--count", type=count, default=0, metavar="N", help="with --watch: end after N snapshots"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the counters; with --watch a page each second."""
    if options.watch:
        return _watch(options)
    answer = ask(options.admin_target, "stats")
    width, paint = width_of(sys.stdout), paint_of(sys.stdout)
    print(json_text(answer) if options.json else "\n".join(lines([answer], width, paint)))
    return 0


class Pages:
    """The pages of the newest counters; keys on the keyboard turn pages."""

    def __init__(self) -> None:
        self.history: deque[Answer] = deque(maxlen=RATE_SNAPSHOTS + 1)
        self.number = 0

    def press(self, keys: str) -> bool:
        """Applies pressed keys. Returns False to end."""
        for key in keys:
            if key in QUIT_KEYS:
                return False
            self.number += (key in NEXT_KEYS) - (key in BACK_KEYS)
        return True

    def take(self, snapshot: Mapping[str, Any]) -> None:
        self.history.append(_stats_of(snapshot))

    def page(self, columns: int, height: int, *, keys: bool, paint: Paint) -> str:
        """Returns a page of the counters; "" before the first snapshot."""
        return self.text(lines(list(self.history), columns, paint), height) if self.history else ""

    def text(self, page_lines: list[str], height: int) -> str:
        """Returns the current page of these lines.

        If there are several pages, the last line names the keys to press.
        """
        if len(page_lines) <= height:
            self.number = 0
            return "\n".join(page_lines)
        room = max(1, height - 1)
        pages = -(-len(page_lines) // room)
        self.number = min(max(0, self.number), pages - 1)
        shown = page_lines[self.number * room : (self.number + 1) * room]
        keys = f"page {self.number + 1} of {pages}: space next, b back, q quit"
        return "\n".join([*shown, *[""] * (room - len(shown)), keys])


def _watch(options: argparse.Namespace) -> int:
    # Imported here, so that `stats` without --watch starts faster.
    from mlxpool.cli.watch import show_pages, snapshots

    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            print(json_text(_stats_of(snapshot)), flush=True)
        return 0
    show_pages(options.admin_target, options.count, Pages())
    return 0


def _stats_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the answer of `stats` from a snapshot of `watch`."""
    return {"broker": snapshot["broker"], **snapshot["stats"]}
