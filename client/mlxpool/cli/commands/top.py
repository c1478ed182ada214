"""`mlxpool top`: the pool, live."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from typing import Any

from mlxpool.cli.columns import joined
from mlxpool.cli.formatting import count
from mlxpool.cli.json_text import json_text
from mlxpool.cli.screens import top_view
from mlxpool.cli.screens.top_view import (
    COLUMNS,
    MAX_SNAPSHOTS,
    SORT_ORDERS,
    Row,
    Snapshot,
    SortOrder,
)
from mlxpool.cli.style import NOTE, Paint, paint_of, plain, table_lines
from mlxpool.common.escapes import escape_line

KEY_INTERVAL = 0.1  # seconds between two reads of the keyboard
KEYS = (
    "q quit",
    "s next column",
    "r reverse",
    *(f"{order.key} {order.name}" for order in SORT_ORDERS),
)


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top",
        parents=[common],
        help="show workers and their work, live",
        description="A snapshot each second. RUN: requests that a worker computes; WAIT: those in"
        " the queue of its model; TOK/S: over three seconds; TTFT: median time to the first token;"
        " KV%: share of the memory beside the weights that running requests take; DRAFTS: share of"
        f" the drafted tokens that were right. Keys: {', '.join(KEYS)}.",
    )
    columns = [order.name for order in SORT_ORDERS]
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        choices=columns,
        default=columns[0],
        help=f"the column to begin with: {', '.join(columns)} (default: %(default)s)",
    )
    parser.add_argument(
        "--count", type=count, default=0, metavar="N", help="end after N snapshots (default: never)"
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

    def page(self, columns: int, lines: int, *, keys: bool, paint: Paint = plain) -> str:
        """The page, at most `lines` lines of `columns` characters; with the keys if `keys`."""
        if not self.history:
            return "waiting for the broker's first snapshot"
        arrow = "falling" if self.order.descending is not self.reversed else "rising"
        parts = [escape_line(part) for part in top_view.summary(self.history)]
        head = joined([*parts, f"sorted by {self.order.name}, {arrow}"], columns)
        shown = self.rows()[: max(1, lines - len(head) - 1 - keys)]
        body = table_lines(COLUMNS, [top_view.cells(row) for row in shown], columns, paint)
        below = [paint(joined(KEYS, columns)[0].removesuffix(","), NOTE)] if keys else []
        return "\n".join([*head, *body, *below])


def run(options: argparse.Namespace) -> int:
    """Show a page for each snapshot until `q`, Ctrl-C or the last of --count."""
    # Here and not above: the other commands start faster without.
    from mlxpool.cli.screens.terminal import screen
    from mlxpool.cli.screens.watch import Subscription, snapshots

    view = View(options.sort)
    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            view.history.append(snapshot)
            print(json_text(as_json(view)), flush=True)
        return 0
    left, paint = options.count, paint_of(sys.stdout)
    with Subscription(options.admin_target) as subscription, screen() as terminal:
        while True:
            newest, keys = subscription.next(KEY_INTERVAL), terminal.pressed_keys()
            if not view.press(keys):
                return 0
            if newest is not None:
                view.history.append(newest)
                left -= 1
            if newest is not None or keys:
                terminal.show(view.page(*terminal.size, keys=terminal.live, paint=paint))
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
