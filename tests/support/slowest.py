"""Prints where the time of a run of the tests went: `make slowest`.

The record is the file that pytest's --junitxml writes: the seconds of each test, set-up and end
included. tests/conftest.py adds the processor time of the test and of the processes that it has
waited for. A test with much more time than processor time waits for something.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PROCESSOR = "processor_s"  # the name of the property


@dataclass(frozen=True, slots=True)
class Spent:
    """What one test took, or several: seconds, seconds of processors, and how many tests."""

    seconds: float = 0.0
    processor: float = 0.0
    tests: int = 1

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.seconds + other.seconds,
            self.processor + other.processor,
            self.tests + other.tests,
        )


def read(record: Path) -> dict[tuple[str, str], Spent]:
    """What each test took, by file and name."""
    found: dict[tuple[str, str], Spent] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        processor = sum(
            float(one.get("value", 0)) for one in case.iter("property")
            if one.get("name") == PROCESSOR
        )  # fmt: skip
        key = (case.get("classname", "").replace(".", "/"), case.get("name", ""))
        one = Spent(float(case.get("time", 0)), processor)
        found[key] = one if key not in found else found[key] + one
    return found


def by_file(tests: Mapping[tuple[str, str], Spent]) -> dict[str, Spent]:
    """The sums of files."""
    sums: dict[str, Spent] = defaultdict(lambda: Spent(tests=0))
    for (file, _), spent in tests.items():
        sums[file] += spent
    return dict(sums)


def table(title: str, rows: Iterable[tuple[str, Spent]], count: int) -> str:
    """The `count` rows that took longest."""
    longest = sorted(rows, key=lambda row: -row[1].seconds)[:count]
    lines = [f"{'seconds':>9} {'processor':>9} {'tests':>6}  {title}"]
    lines += [f"{s.seconds:9.1f} {s.processor:9.1f} {s.tests:6}  {name}" for name, s in longest]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="where the time of the last `make test` went")
    parser.add_argument("record", type=Path)
    parser.add_argument("--count", type=int, default=40, help="rows of each table")
    given = parser.parse_args()
    if not given.record.is_file():
        print(f"{given.record} does not exist; run `make test` first", file=sys.stderr)
        return 1
    tests = read(given.record)
    files = by_file(tests)
    print(table("file", files.items(), given.count))
    named = ((f"{file}::{name}", spent) for (file, name), spent in tests.items())
    print(table("test", named, given.count))
    print(table("all", [("", sum(files.values(), Spent(tests=0)))], 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
