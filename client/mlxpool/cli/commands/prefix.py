"""`mlxpool prefix`: the prefixes that workers keep on disk. Needs no broker."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.cli.formatting import duration, json_text, kv_cache, size, table
from mlxpool.cli.pool_flags import add_settings, settings_of
from mlxpool.common.escapes import escape_line
from mlxpool.common.records import as_map

if TYPE_CHECKING:
    from mlxpool.worker.prefix_disk.survey import Contents

SOUND, UNSOUND = 0, 1
SHOWN_DIGEST = 12  # characters
MAX_SHOWN = 20  # faults; --json has all
FIGURES = ("segments", "records", "tokens", "bytes", "bad", "torn")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `prefix ls`, `prefix rm` and `prefix verify`."""
    prefix = commands.add_parser("prefix", help="list, check or delete prefixes kept on disk")
    verbs = prefix.add_subparsers(dest="verb", metavar="VERB", required=True)
    parser = verbs.add_parser(
        "ls",
        parents=[common],
        help="what there is, by model and digest",
        description="A row for each digest of each model. Segments of another digest than the"
        " workers have now are of no use to them, and the first to be deleted.",
    )
    _add_flags(parser, "of this model only", optional=True)
    parser.set_defaults(run=ls)
    parser = verbs.add_parser(
        "verify",
        parents=[common],
        help="read and check every record",
        description="Exit code 0: every record checks; 1: some do not, which workers take for"
        " misses. What a worker that was killed had not completed is `torn`, and no fault.",
    )
    _add_flags(parser, "of this model only", optional=True)
    parser.set_defaults(run=verify)
    parser = verbs.add_parser(
        "rm",
        parents=[common],
        help="delete the prefixes of a model",
        description="Workers may run: they notice it within a second.",
    )
    _add_flags(parser, "whose prefixes are deleted", optional=False)
    parser.add_argument("--digest", default="", help="only those whose digest begins so")
    parser.set_defaults(run=rm)


def _add_flags(parser: argparse.ArgumentParser, what: str, *, optional: bool) -> None:
    parser.add_argument("name", metavar="MODEL", nargs="?" if optional else None, help=what)
    parser.add_argument(
        "--prefix-dir",
        type=Path,
        metavar="DIR",
        help="the folder (default: `prefix_dir` of the settings, else mlxpool/prefixes in"
        " $XDG_CACHE_HOME)",
    )
    add_settings(parser)


def _root(options: argparse.Namespace) -> Path:
    found: Path = options.prefix_dir or settings_of(options).prefix_dir
    return found


def _surveys() -> Any:
    """The module that reads segments. Raises ValueError where its packages are not installed."""
    try:
        from mlxpool.worker.prefix_disk import survey
    except ImportError as error:
        raise ValueError(
            f"a package of workers is not installed here: {error}; run this where workers run"
        ) from None
    return survey


def ls(options: argparse.Namespace) -> int:
    """Print what the folder has."""
    root = _root(options)
    found = _surveys().survey(root, options.name)
    if options.json:
        models = [as_map(one) for one in found]
        print(json_text({"prefix_dir": str(root), "models": models}))
    else:
        print("\n".join(_rows(root, found)))
    return SOUND


def verify(options: argparse.Namespace) -> int:
    """Print whether every record checks."""
    root = _root(options)
    found = _surveys().survey(root, options.name, verify=True)
    total = {name: sum(getattr(one, name) for one in found) for name in FIGURES}
    faults = [fault for one in found for fault in one.faults]
    if options.json:
        print(json_text({"prefix_dir": str(root), **total, "faults": faults}))
    elif not found:
        print(escape_line(_nothing_in(root)))
    else:
        lines = [
            f"{_counted(total['records'], 'record')} in {_counted(total['segments'], 'segment')},"
            f" {size(total['bytes'])}: {total['bad']:,} bad, {size(total['torn'])} torn"
        ]
        lines += [f"  - {fault}" for fault in faults[:MAX_SHOWN]]
        if len(faults) > MAX_SHOWN:
            lines.append(f"  … and {len(faults) - MAX_SHOWN} more, which --json lists")
        print("\n".join(map(escape_line, lines)))
    return UNSOUND if total["bad"] else SOUND


def rm(options: argparse.Namespace) -> int:
    """Delete the prefixes of a model."""
    root = _root(options)
    freed = _surveys().remove(root, options.name, options.digest)
    if options.json:
        print(json_text({"prefix_dir": str(root), "model": options.name, "bytes": freed}))
    else:
        print(f"{size(freed)} of {escape_line(options.name)} deleted")
    return SOUND


def _counted(number: int, noun: str) -> str:
    """A number and its noun, as `1 segment`."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def _nothing_in(root: Path) -> str:
    what = "has no prefixes" if root.exists() else "does not exist: no prefixes were kept there"
    return f"{root} {what}"


def _rows(root: Path, found: Sequence[Contents]) -> Iterator[str]:
    if not found:
        yield escape_line(_nothing_in(root))
        return
    rows = [("MODEL", "DIGEST", "KV CACHE", "DEVICE", "RECORDS", "TOKENS", "SIZE", "USED")]
    for one in found:
        rows.append(
            (
                one.model,
                one.digest[:SHOWN_DIGEST],
                kv_cache(str(one.about.get("layout", "-"))),
                str(one.about.get("device", "-")),
                f"{one.records:,}",
                f"{one.tokens:,}",
                size(one.bytes),
                f"{duration(max(0.0, time.time() - one.used))} ago",
            )
        )
    yield from table(rows)
