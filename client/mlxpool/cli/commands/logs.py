"""`mlxpool logs`: the logs of the local pool's workers, from files in its run directory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mlxpool.cli.formatting import count, json_text, size
from mlxpool.common.paths import log_slot, worker_log

POLL_INTERVAL = 0.2  # seconds between two checks of a followed file
BLOCK = 1 << 16  # the most bytes of one read


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `logs`."""
    parser = commands.add_parser(
        "logs",
        parents=[common],
        help="show the log of a worker",
        description="Prints the last lines of a worker's log; without SLOT prints a line for each"
        " log. The broker logs to its standard error. Workers on other machines log there.",
    )
    parser.add_argument("slot", nargs="?", metavar="SLOT", help="a slot in `mlxpool ps`: demo/0")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log until Ctrl-C")
    parser.add_argument(
        "-n", "--tail", type=count, default=100, metavar="LINES",
        help="number of last lines to print, 0: all (100)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints a log, or the list of logs. Raises ValueError if the slot has no log."""
    folder = options.run_dir / "logs"
    files = {log_slot(path): path for path in sorted(folder.glob("*.log"))}
    if options.slot is None:
        rows = [(slot, path, path.stat().st_size) for slot, path in files.items()]
        if options.json:
            logs = [{"slot": s, "path": str(p), "bytes": b} for s, p, b in rows]
            print(json_text({"logs": logs}))
        else:
            print("\n".join(f"{s}  {size(b)}  {p}" for s, p, b in rows) or f"no logs in {folder}")
        return 0
    path = worker_log(options.run_dir, options.slot)
    if not path.is_file():
        known = ", ".join(files) or "none"
        raise ValueError(
            f"there is no log of slot {options.slot!r} in {folder}; there are: {known}"
        )
    for part in parts(path, options.tail, follow=options.follow):
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    return 0


def parts(path: Path, lines: int, *, follow: bool) -> Iterator[bytes]:
    """Yields the last `lines` lines of a file, or all lines if `lines` is 0.

    With `follow`, also yields all later lines. If the broker has cut or replaced the file, reading
    starts again at its beginning.
    """
    file = path.open("rb")
    try:
        file.seek(tail_offset(file, lines))
        while True:
            while part := file.read(BLOCK):
                yield part
            if not follow:
                return
            time.sleep(POLL_INTERVAL)
            if file.tell() > os.fstat(file.fileno()).st_size:
                file.seek(0)
    finally:
        file.close()


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Returns the offset in the file at which the last `lines` lines begin; 0 for all lines."""
    end = position = file.seek(0, os.SEEK_END)
    if not lines:
        return 0
    count_of_lines = 0
    while position:
        begin = max(0, position - BLOCK)
        file.seek(begin)
        block = file.read(position - begin)
        for i in range(len(block) - 1, -1, -1):
            if block[i] == 0x0A and begin + i != end - 1:
                count_of_lines += 1
                if count_of_lines == lines:
                    return begin + i + 1
        position = begin
    return 0
