"""`mlxpool top`: the pool, live. In colours with rich (extra `cli`), plain without."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from mlxpool.cli import top_view
from mlxpool.cli.formatting import count, table
from mlxpool.cli.top_view import HEAD, MAX_SNAPSHOTS, SORT_ORDERS, Row, Snapshot, SortOrder
from mlxpool.common.escapes import escape_line

KEY_INTERVAL = 0.1  # seconds between two reads of the keyboard
KEYS = "q quit, s next column, r turn round, or a column: " + " ".join(
    f"{order.key} {order.name}" for order in SORT_ORDERS
)
COLOURS = {"ready": "green", "suspect": "yellow", "broken": "red", "failed": "red"}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top",
        parents=[common],
        help="workers and their work, live",
        description=f"A picture each second. Keys: {KEYS}.",
    )
    parser.add_argument(
        "--sort",
        choices=[order.name for order in SORT_ORDERS],
        default=SORT_ORDERS[0].name,
        help="the column to begin with (default: %(default)s)",
    )
    parser.add_argument(
        "--count", type=count, default=0, metavar="N", help="end after N pictures (default: never)"
    )
    parser.set_defaults(run=run)


class View:
    """The sort order that keys choose, and the snapshots of the last minute."""

    def __init__(self, sort: str) -> None:
        self.history: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self.order = next(order for order in SORT_ORDERS if order.name == sort)
        self.reversed = False

    def press(self, keys: str) -> bool:
        """Apply pressed keys; returns False to end."""
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
        return top_view.ordered(top_view.rows(self.history), self.order, reverse=self.reversed)

    def page(self, columns: int, lines: int, *, live: bool) -> str:
        """The page, at most `lines` lines of `columns` characters; with the keys if `live`."""
        if not self.history:
            return "waiting for the broker's first picture"
        shown = self.rows()[: max(1, lines - 4)]
        arrow = "falling" if self.order.descending is not self.reversed else "rising"
        summary = escape_line(top_view.summary(self.history))
        head = [summary, f"sorted by {self.order.name}, {arrow}"]
        body = _table(shown, columns, live)
        keys = [KEYS[:columns]] if live else []
        return "\n".join([*(line[:columns] for line in head), *body, *keys])


def run(options: argparse.Namespace) -> int:
    """Show a page for each snapshot until `q`, Ctrl-C or the last of --count."""
    # Here and not above: the other commands start faster without.
    from mlxpool.cli.terminal import screen
    from mlxpool.cli.watch import Subscription, snapshots

    view = View(options.sort)
    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            view.history.append(snapshot)
            print(json.dumps(as_json(view)), flush=True)
        return 0
    left = options.count
    with Subscription(options.admin_target) as subscription, screen() as terminal:
        while True:
            newest, keys = subscription.next(KEY_INTERVAL), terminal.pressed_keys()
            if not view.press(keys):
                return 0
            if newest is not None:
                view.history.append(newest)
                left -= 1
            if newest is not None or keys:
                terminal.show(view.page(*terminal.size, live=terminal.live))
            if newest is not None and left == 0:
                return 0


def as_json(view: View) -> dict[str, Any]:
    """One line of `top --json`."""
    newest = view.history[-1]
    return {
        "uptime_s": newest["broker"]["uptime_s"],
        "requests": newest["stats"]["requests"],
        "queued": newest["stats"]["queued"],
        "rows": [row.as_json() for row in view.rows()],
    }


def _table(rows: Sequence[Row], columns: int, colours: bool) -> list[str]:
    lines = [[escape_line(cell) for cell in top_view.cells(row)] for row in rows]
    if colours and importlib.util.find_spec("rich") is not None:
        return _colour_table(lines, columns)
    return [line[:columns] for line in table([HEAD, *lines])]


def _colour_table(lines: Sequence[Sequence[str]], columns: int) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, name in enumerate(HEAD):
        drawn.add_column(name, no_wrap=True, justify="left" if number < 3 else "right")
    state = HEAD.index("STATE")
    for line in lines:
        cells = [Text(cell) for cell in line]
        cells[state].stylize(COLOURS.get(line[state], ""))
        drawn.add_row(*cells)
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(drawn)
    return captured.get().splitlines()
