"""`mlxpool logs`: what the workers of the local pool log, from files in its run directory."""

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

POLL_INTERVAL = 0.2  # seconds between two looks at a file that is followed
BLOCK = 1 << 16  # bytes that are read at a time


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `logs`."""
    parser = commands.add_parser(
        "logs",
        parents=[common],
        help="show what a worker logs",
        description="Prints the last lines of a worker's log; without SLOT a line for each log. The"
        " broker logs to its standard error. Workers on other machines log there.",
    )
    parser.add_argument("slot", nargs="?", metavar="SLOT", help="as `mlxpool ps` has it: demo/0")
    parser.add_argument("-f", "--follow", action="store_true", help="go on, until Ctrl-C")
    parser.add_argument(
        "-n", "--tail", type=count, default=100, metavar="LINES", help="last lines, 0: all (100)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a log, or which there are. Raises ValueError for a slot without a log."""
    folder = options.run_dir / "logs"
    files = {log_slot(path): path for path in sorted(folder.glob("*.log"))}
    if options.slot is None:
        rows = [(slot, path, path.stat().st_size) for slot, path in files.items()]
        if options.json:
            found = [{"slot": s, "path": str(p), "bytes": b} for s, p, b in rows]
            print(json_text({"logs": found}))
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
    """The last lines of a file, 0: all; with `follow` without end what is appended to it.

    The file is read from its beginning again where the broker has cut or replaced it.
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
    """The offset at which the last `lines` lines begin; 0 for all of them."""
    end = position = file.seek(0, os.SEEK_END)
    if not lines:
        return 0
    found = 0
    while position:
        begin = max(0, position - BLOCK)
        file.seek(begin)
        block = file.read(position - begin)
        for i in range(len(block) - 1, -1, -1):
            if block[i] == 0x0A and begin + i != end - 1:
                found += 1
                if found == lines:
                    return begin + i + 1
        position = begin
    return 0
