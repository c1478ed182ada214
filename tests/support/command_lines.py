"""Parses command lines of deployment files with the parser of `mlxpool`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mlxpool.cli.main import parser


def verbs(root: argparse.ArgumentParser) -> set[str]:
    """The names of the commands."""
    (commands,) = (a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    return set(commands.choices)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """`mlxpool ARGUMENTS`, parsed. Raises AssertionError if the parser refuses them."""
    root = parser()
    given = [a for a in arguments if a in verbs(root)]
    assert given, f"no command in {arguments}"
    try:
        return root.parse_args(list(arguments))
    except SystemExit as error:
        raise AssertionError(f"mlxpool does not understand {arguments}") from error
