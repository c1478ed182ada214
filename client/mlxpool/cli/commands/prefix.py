"""`mlxpool prefix`: the cached prefixes that workers store on disk. Needs no broker."""

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
MAX_SHOWN = 20  # the most shown faults; --json has all faults
FIGURES = ("segments", "records", "tokens", "bytes", "bad", "torn")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `prefix ls`, `prefix rm` and `prefix verify`."""
    prefix = commands.add_parser("prefix", help="list, check or delete prefixes kept on disk")
    verbs = prefix.add_subparsers(dest="verb", metavar="VERB", required=True)
    parser = verbs.add_parser(
        "ls",
        parents=[common],
        help="list prefixes by model and digest",
        description="Prints a row for each digest of each model. The present workers cannot use"
        " segments of another digest than their own; these are the first to be deleted.",
    )
    _add_flags(parser, "list only prefixes of this model", optional=True)
    parser.set_defaults(run=ls)
    parser = verbs.add_parser(
        "verify",
        parents=[common],
        help="read and check every record",
        description="Exit code 0: every record is sound; 1: some are bad, which workers treat as"
        " misses. An incomplete record of a killed worker is `torn`, which is not a fault.",
    )
    _add_flags(parser, "check only prefixes of this model", optional=True)
    parser.set_defaults(run=verify)
    parser = verbs.add_parser(
        "rm",
        parents=[common],
        help="delete the prefixes of a model",
        description="Workers may run: they notice the deletion within a second.",
    )
    _add_flags(parser, "the model whose prefixes are deleted", optional=False)
    parser.add_argument(
        "--digest", default="", help="delete only prefixes whose digest begins with this"
    )
    parser.set_defaults(run=rm)


def _add_flags(parser: argparse.ArgumentParser, text: str, *, optional: bool) -> None:
    parser.add_argument("name", metavar="MODEL", nargs="?" if optional else None, help=text)
    parser.add_argument(
        "--prefix-dir",
        type=Path,
        metavar="DIR",
        help="folder of the prefixes (default: `prefix_dir` of the settings, else mlxpool/prefixes"
        " in $XDG_CACHE_HOME)",
    )
    add_settings(parser)


def _root(options: argparse.Namespace) -> Path:
    folder: Path = options.prefix_dir or settings_of(options).prefix_dir
    return folder


def _surveys() -> Any:
    """Returns the worker's module that reads prefixes on disk.

    Raises ValueError if a package of workers is not installed.
    """
    try:
        from mlxpool.worker.prefix_disk import survey
    except ImportError as error:
        raise ValueError(
            f"a package of workers is not installed here: {error}; run this where workers run"
        ) from None
    return survey


def ls(options: argparse.Namespace) -> int:
    """Prints the contents of the prefix folder."""
    root = _root(options)
    contents = _surveys().survey(root, options.name)
    if options.json:
        models = [as_map(part) for part in contents]
        print(json_text({"prefix_dir": str(root), "models": models}))
    else:
        print("\n".join(_rows(root, contents)))
    return SOUND


def verify(options: argparse.Namespace) -> int:
    """Reads every stored record, and prints the faults."""
    root = _root(options)
    contents = _surveys().survey(root, options.name, verify=True)
    total = {name: sum(getattr(part, name) for part in contents) for name in FIGURES}
    faults = [fault for part in contents for fault in part.faults]
    if options.json:
        print(json_text({"prefix_dir": str(root), **total, "faults": faults}))
    elif not contents:
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
    """Deletes the stored prefixes of a model."""
    root = _root(options)
    freed = _surveys().remove(root, options.name, options.digest)
    if options.json:
        print(json_text({"prefix_dir": str(root), "model": options.name, "bytes": freed}))
    else:
        print(f"{size(freed)} of {escape_line(options.name)} deleted")
    return SOUND


def _counted(number: int, noun: str) -> str:
    """Returns a number and its noun, such as `1 segment`."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def _nothing_in(root: Path) -> str:
    state = "has no prefixes" if root.exists() else "does not exist: no prefixes were kept there"
    return f"{root} {state}"


def _rows(root: Path, contents: Sequence[Contents]) -> Iterator[str]:
    if not contents:
        yield escape_line(_nothing_in(root))
        return
    rows = [("MODEL", "DIGEST", "KV CACHE", "DEVICE", "RECORDS", "TOKENS", "SIZE", "USED")]
    for part in contents:
        rows.append(
            (
                part.model,
                part.digest[:SHOWN_DIGEST],
                kv_cache(str(part.about.get("layout", "-"))),
                str(part.about.get("device", "-")),
                f"{part.records:,}",
                f"{part.tokens:,}",
                size(part.bytes),
                f"{duration(max(0.0, time.time() - part.used))} ago",
            )
        )
    yield from table(rows)
