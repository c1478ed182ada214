"""Parses command lines of deployment files with the parser of `mlxpool`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from mlxpool.cli.main import parser


def options(root: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """The options and arguments of a parser, which argparse shows in no other way."""
    return root._actions


def verbs(root: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands of a parser, each with its own parser."""
    found = (one.choices for one in options(root) if isinstance(one.choices, dict))
    return next(found, {})


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """`mlxpool ARGUMENTS`, parsed. Raises AssertionError if the parser refuses them."""
    root = parser()
    given = [a for a in arguments if a in verbs(root)]
    assert given, f"no command in {arguments}"
    try:
        return root.parse_args(list(arguments))
    except SystemExit as error:
        raise AssertionError(f"mlxpool does not understand {arguments}") from error
