"""`mlxpool help`, `mlxpool version`, and `mlxpool completion`, whose script shtab makes."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpool.cli.formatting import json_text
from mlxpool.common.version import VERSION

SHELLS = ("bash", "zsh", "fish")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `help`, `version` and `completion`."""
    parser = commands.add_parser(
        "help", parents=[common], help="show the commands, or the options of a command"
    )
    parser.add_argument(
        "words", metavar="COMMAND", nargs="*", help="a command: `run`, `config show`, …"
    )
    parser.set_defaults(run=show_help)
    commands.add_parser("version", parents=[common], help="print the version").set_defaults(
        run=show_version
    )
    parser = commands.add_parser(
        "completion",
        parents=[common],
        help="print a script that completes this command line in a shell",
        description='In this session, run `eval "$(mlxpool completion bash)"`, or with zsh;'
        " `mlxpool completion fish | source`. docs/cli.md shows how to install the script.",
    )
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help=f"shell of the script: {', '.join(SHELLS)}"
    )
    parser.set_defaults(run=complete)


def show_help(options: argparse.Namespace) -> int:
    """Prints the help; an unknown command ends with exit code 2."""
    arguments = [*options.words, "--help"]
    options.whole_parser(arguments).parse_args(arguments)
    return 0


def show_version(options: argparse.Namespace) -> int:
    """Prints the version."""
    print(json_text({"version": VERSION}) if options.json else f"mlxpool {VERSION}")
    return 0


def complete(options: argparse.Namespace) -> int:
    """Prints the completion script for a shell."""
    text = script(options.whole_parser(), options.shell)
    print(json_text({"shell": options.shell, "script": text}) if options.json else text)
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the completion script for one of SHELLS."""
    import shtab  # imported here: only this command needs it

    return str(shtab.complete(parser, shell=shell))
