"""`mlxpool completion`: a script by which a shell completes this command line, made by shtab."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpool.cli.json_text import json_text

SHELLS = ("bash", "zsh", "fish")


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `completion`."""
    parser = commands.add_parser(
        "completion",
        parents=[common],
        help="print a script by which a shell completes this command line",
        description='For this session: `eval "$(mlxpool completion bash)"`, or with zsh;'
        " `mlxpool completion fish | source`. docs/cli.md says where the script can stay.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    text = script(options.whole_parser(), options.shell)
    print(json_text({"shell": options.shell, "script": text}) if options.json else text)
    return 0


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for one of SHELLS."""
    import shtab  # only this command needs it

    return str(shtab.complete(parser, shell=shell))
