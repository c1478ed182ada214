"""`mlxpool revoke`: removes a key from the broker's config, and makes the broker reload it."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.cli.formatting import json_text
from mlxpool.common.checks import did_you_mean
from mlxpool.common.errors import BrokerLost
from mlxpool.common.paths import config_file

SECTION = re.compile(r"\s*\[")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `revoke`."""
    sub = commands.add_parser(
        "revoke",
        parents=[common],
        help="make a key invalid at once",
        description="Removes [keys.NAME] from the broker's config, replaces that file, and makes"
        " the broker read it. The key's file stays where it is.",
    )
    sub.add_argument("name", metavar="NAME", help="name of the key's section in the config")
    sub.add_argument(
        "--config", type=Path, metavar="FILE", help="the broker's config (default: as for `serve`)"
    )
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the file, then asks the broker to reload it. Raises ValueError, OSError, PoolError."""
    from mlxpool.cli import admin

    file = config_file(options.config)
    if file is None:
        raise ValueError("there is no config to take a key out of; name it with --config FILE")
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the config {file}: {error.strerror}") from None
    replace(file, without(text, options.name, str(file)))
    reloaded = True
    try:
        admin.reload(options.admin_target)
    except BrokerLost:
        reloaded = False
    ending = (
        "the broker cuts it off" if reloaded else "no broker answers: it holds for the next one"
    )
    answer = {"name": options.name, "file": str(file), "reloaded": reloaded}
    print(json_text(answer) if options.json else f"{options.name}: revoked in {file}; {ending}")
    return 0


def without(text: str, name: str, where: str) -> str:
    """Returns the text of a config without the section of a key. Pure.

    Raises ValueError if there is no such key, or if the key has no section of its own.
    """
    import tomllib

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the config {where} is not TOML: {error}") from None
    keys = table.get("keys", {})
    if name not in keys:
        hint = did_you_mean(name, keys) or f"; known: {', '.join(keys) or 'none'}"
        raise ValueError(f"{where} has no key {name!r:.80}{hint}")
    lines = text.splitlines(keepends=True)
    head = re.compile(rf"\s*\[\s*keys\s*\.\s*(['\"]?){re.escape(name)}\1\s*\]")
    begin = next((n for n, line in enumerate(lines) if head.match(line)), len(lines))
    end = next((n for n in range(begin + 1, len(lines)) if SECTION.match(lines[n])), len(lines))
    while end > begin + 1 and re.match(r"\s*(#|$)", lines[end - 1]):
        end -= 1  # comments above the next section are part of that section
    rest = "".join([*lines[:begin], *lines[end:]])
    expected = {**table, "keys": {key: value for key, value in keys.items() if key != name}}
    if not _parses_to(rest, expected):
        raise ValueError(
            f"{where} has the key {name!r} in no section of its own: take it out by hand"
        )
    return rest


def _parses_to(text: str, expected: Mapping[str, Any]) -> bool:
    import tomllib

    try:
        return {"keys": {}, **tomllib.loads(text)} == expected
    except tomllib.TOMLDecodeError:
        return False


def replace(file: Path, text: str) -> None:
    """Replaces the text of a file atomically. Owner, group and mode do not change."""
    file = file.resolve()
    status = file.stat()
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as new:
            os.fchmod(descriptor, status.st_mode & 0o7777)
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            new.write(text)
            new.flush()
            os.fsync(descriptor)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
