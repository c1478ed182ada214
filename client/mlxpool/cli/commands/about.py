"""`mlxpool help` and `mlxpool version`."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpool.cli.json_text import json_text
from mlxpool.common.version import VERSION


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `help` and `version`."""
    parser = commands.add_parser(
        "help", parents=[common], help="show the commands, or the options of one"
    )
    parser.add_argument("words", metavar="COMMAND", nargs="*", help="such as `run`, `config show`")
    parser.set_defaults(run=show_help)
    commands.add_parser("version", parents=[common], help="print the version").set_defaults(
        run=show_version
    )


def show_help(options: argparse.Namespace) -> int:
    """Print the help; an unknown command ends with exit code 2, as it does without `help`."""
    arguments = [*options.words, "--help"]
    options.whole_parser(arguments).parse_args(arguments)
    return 0


def show_version(options: argparse.Namespace) -> int:
    """Print the version."""
    print(json_text({"version": VERSION}) if options.json else f"mlxpool {VERSION}")
    return 0
