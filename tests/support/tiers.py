"""Which tests `make test` runs, and which `make test-all` runs besides.

tests/tiers.toml has the table: files and functions that only `make test-all` runs, files and
folders of which `make test` runs the first cases of each function, and the processor seconds that
`make test` may use. All other tests are in both. A file that the command line names is run whole.
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
EVERYTHING = "TESTS_FULL"  # set in all processes of a run with --full


@dataclass(frozen=True, slots=True)
class Tiers:
    """The table. Paths are relative to tests/ and have `/`; a function is `FILE::FUNCTION`."""

    full: Mapping[str, str]  # file or function that only `make test-all` runs -> the reason
    first: Mapping[str, int]  # file, folder or function -> cases of each function in `make test`
    budget: Mapping[str, float]  # folder -> processor seconds of its tests in `make test`

    def leaves_out(self, file: str) -> bool:
        """Whether `make test` has no test of the file."""
        return file in self.full

    def cases(self, file: str, function: str) -> int | None:
        """Returns how many cases of a function `make test` runs, None if all of them."""
        if file in self.full or f"{file}::{function}" in self.full:
            return 0
        keys = [f"{file}::{function}", file, *(str(one) for one in Path(file).parents)]
        return next((self.first[key] for key in keys if key in self.first), None)

    def kept(self, tests: Sequence[tuple[str, str]]) -> list[bool]:
        """Returns for each test, as (file, name), whether `make test` runs it.

        The name of a case is `FUNCTION[PARAMETERS]`. The first cases are those collected first.
        """
        seen: dict[tuple[str, str], int] = {}
        found = []
        for file, name in tests:
            function = name.partition("[")[0]
            number = seen[file, function] = seen.get((file, function), 0) + 1
            most = self.cases(file, function)
            found.append(most is None or number <= most)
        return found

    def unknown(self, tests: Iterable[tuple[str, str]]) -> list[str]:
        """Returns the keys of the table that no collected test, as (file, name), belongs to."""
        known: set[str] = set()
        for file, name in tests:
            known |= {file, f"{file}::{name.partition('[')[0]}"}
            known |= {str(one) for one in Path(file).parents}
        return [key for key in (*self.full, *self.first) if key not in known]


@cache
def tiers() -> Tiers:
    """Returns the table of tests/tiers.toml."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Tiers(found["full"], found["first"], found["budget"])


def everything() -> bool:
    """Returns whether this run is `make test-all`, for tests that have more rounds there."""
    return EVERYTHING in os.environ


def relative(path: Path) -> str:
    """Returns a path below tests/ as the table has it, another one as it is."""
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else str(path)
