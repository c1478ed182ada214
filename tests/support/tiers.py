"""The tests of `make test`, and the additional tests of `make test-all`.

tests/tiers.toml has the table. `full`: files and functions that only `make test-all` runs. `first`:
files, folders and functions, each with the number of cases of a function that `make test` runs.
`budget`: the processor seconds of `make test`. `make test` runs all other tests, too. A file on the
command line is run completely.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "tiers.toml"
EVERYTHING = "TESTS_FULL"  # environment variable, set in all processes of a run with --full


@dataclass(frozen=True, slots=True)
class Tiers:
    """The table of tests/tiers.toml, which selects the tests of `make test`.

    Paths are relative to tests/ and have `/`; a function is `FILE::FUNCTION`.
    """

    full: Mapping[str, str]  # file or function that only `make test-all` runs -> the reason
    first: Mapping[str, int]  # file, folder or function -> cases of each function in `make test`
    budget: Mapping[str, float]  # folder -> processor seconds of its tests in `make test`

    def leaves_out(self, file: str) -> bool:
        """Returns whether `make test` runs no test of the file."""
        return file in self.full

    def cases(self, file: str, function: str) -> int | None:
        """Returns the number of a function's cases that `make test` runs; None for all cases."""
        if file in self.full or f"{file}::{function}" in self.full:
            return 0
        keys = [f"{file}::{function}", file, *(str(parent) for parent in Path(file).parents)]
        return next((self.first[key] for key in keys if key in self.first), None)

    def kept(self, tests: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns for each test, as (file, name), whether `make test` runs it.

        The name of a case is `FUNCTION[PARAMETERS]`. Of a function's cases the first in `tests` are
        run.
        """
        seen: dict[tuple[str, str], int] = {}
        kept_ = []
        for file, name in tests:
            function = name.partition("[")[0]
            number = seen[file, function] = seen.get((file, function), 0) + 1
            most = self.cases(file, function)
            kept_.append(most is None or number <= most)
        return kept_

    def unknown(self, tests: Iterable[tuple[str, str]]) -> list[str]:
        """Returns the keys of the table to which no collected test, as (file, name), belongs."""
        known: set[str] = set()
        for file, name in tests:
            known |= {file, f"{file}::{name.partition('[')[0]}"}
            known |= {str(parent) for parent in Path(file).parents}
        return [key for key in (*self.full, *self.first) if key not in known]


@cache
def tiers() -> Tiers:
    """Returns the table of tests/tiers.toml."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Tiers(table["full"], table["first"], table["budget"])


def everything() -> bool:
    """Returns whether this run is `make test-all`: some tests then run more rounds."""
    return EVERYTHING in os.environ


def relative(path: Path) -> str:
    """Returns a path below tests/ in the form of the table; another path unchanged."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else str(path)
