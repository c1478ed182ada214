"""`mlxpool stats`: counters of the broker, in groups and with rates; --watch repeats them."""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from mlxpool.cli.admin import ask
from mlxpool.cli.formatting import count
from mlxpool.cli.json_text import json_text
from mlxpool.cli.screens import stats_view
from mlxpool.cli.screens.stats_view import RATE_SNAPSHOTS
from mlxpool.cli.style import paint_of, width_of

KEY_INTERVAL = 0.1  # seconds between two reads of the keyboard
NEXT_KEYS, BACK_KEYS, QUIT_KEYS = " nj", "bpk", "qQ\x03\x04"


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
    print(
        json_text(answer) if options.json else "\n".join(stats_view.lines([answer], width, paint))
    )
    return 0


class Pages:
    """The page of the newest counters that is shown; keys turn pages."""

    def __init__(self) -> None:
        self.history: deque[Mapping[str, Any]] = deque(maxlen=RATE_SNAPSHOTS + 1)
        self.number = 0

    def press(self, keys: str) -> bool:
        """Apply pressed keys; returns False to end."""
        for key in keys:
            if key in QUIT_KEYS:
                return False
            self.number += (key in NEXT_KEYS) - (key in BACK_KEYS)
        return True

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
    from mlxpool.cli.screens.terminal import screen
    from mlxpool.cli.screens.watch import Subscription, snapshots

    if options.json:
        for snapshot in snapshots(options.admin_target, options.count):
            print(json_text(_stats_of(snapshot)), flush=True)
        return 0
    pages, left, paint = Pages(), options.count, paint_of(sys.stdout)
    with Subscription(options.admin_target) as subscription, screen() as terminal:
        while True:
            newest, keys = subscription.next(KEY_INTERVAL), terminal.pressed_keys()
            if not pages.press(keys):
                return 0
            if newest is not None:
                pages.history.append(_stats_of(newest))
                left -= 1
            if pages.history and (newest is not None or keys):
                columns, height = terminal.size
                found = stats_view.lines(list(pages.history), columns, paint)
                terminal.show(pages.text(found, height))
            if newest is not None and left == 0:
                return 0


def _stats_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `stats`, from a snapshot of `watch`."""
    return {"broker": snapshot["broker"], **snapshot["stats"]}
