"""Parses command lines of deployment files with the parser of `mlxpool`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from mlxpool.cli.main import parser


def options(root: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """Returns the options and arguments of a parser, from a private attribute of argparse."""
    return root._actions


def verbs(root: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Returns the commands of a parser, each with its own parser."""
    choices = (action.choices for action in options(root) if isinstance(action.choices, dict))
    return next(choices, {})


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed `mlxpool ARGUMENTS`. Raises AssertionError if the parser refuses them."""
    root = parser()
    commands = [a for a in arguments if a in verbs(root)]
    assert commands, f"no command in {arguments}"
    try:
        return root.parse_args(list(arguments))
    except SystemExit as error:
        raise AssertionError(f"mlxpool does not understand {arguments}") from error
