"""Prints the slowest tests of a run: `make slowest`, and `make budget`.

The record is the file of pytest's --junitxml: the seconds of each test, with set-up and end.
tests/conftest.py adds the processor time of the test and of the processes that it has waited for. A
test with much more time than processor time waits for something.

The budget of `make test` is in processor seconds, by folder (tests/tiers.toml), on the machine of
REFERENCE_S. A fixed loop is timed to compare this machine with it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from support.tiers import tiers

PROCESSOR = "processor_s"  # the name of the property with the processor seconds
REFERENCE_S = 0.035  # processor seconds of `_fixed_work` on the machine of the budget


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of tests: elapsed seconds, processor seconds, and the number of tests."""

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
    """Returns the cost of each test, by file and name."""
    spent: dict[tuple[str, str], Spent] = {}
    for case in ElementTree.parse(record).iter("testcase"):
        processor = sum(
            float(total.get("value", 0)) for total in case.iter("property")
            if total.get("name") == PROCESSOR
        )  # fmt: skip
        key = (case.get("classname", "").replace(".", "/"), case.get("name", ""))
        total = Spent(float(case.get("time", 0)), processor)
        spent[key] = total if key not in spent else spent[key] + total
    return spent


def by_file(tests: Mapping[tuple[str, str], Spent]) -> dict[str, Spent]:
    """Returns the total cost of each file."""
    sums: dict[str, Spent] = defaultdict(lambda: Spent(tests=0))
    for (file, _), spent in tests.items():
        sums[file] += spent
    return dict(sums)


def table(title: str, rows: Iterable[tuple[str, Spent]], count: int) -> str:
    """Returns the `count` rows that took longest."""
    longest = sorted(rows, key=lambda row: -row[1].seconds)[:count]
    lines = [f"{'seconds':>9} {'processor':>9} {'tests':>6}  {title}"]
    lines += [f"{s.seconds:9.1f} {s.processor:9.1f} {s.tests:6}  {name}" for name, s in longest]
    return "\n".join(lines)


def by_folder(files: Mapping[str, Spent], folders: Iterable[str]) -> dict[str, Spent]:
    """Returns the total cost of each folder.

    A file counts only for the innermost of the folders that contain it, or for "" if none does.
    """
    sums: dict[str, Spent] = {folder: Spent(tests=0) for folder in (*folders, "")}
    for file, spent in files.items():
        inside = (folder for folder in sums if f"{folder}/" in f"{file}/" and folder)
        sums[max(inside, key=len, default="")] += spent
    return sums


def folder_of(key: str) -> str:
    """Returns the folder of a key in the budget; "." is the folder of all tests."""
    return "tests" if key == "." else f"tests/{key}"


def _fixed_work() -> float:
    """Returns the processor seconds of a fixed loop."""
    began = time.process_time()
    numbers: dict[int, str] = {}
    for i in range(400_000):
        numbers[i * 7919 % 65_536] = str(i)
    return time.process_time() - began


def machine_factor() -> float:
    """Returns the ratio of this machine's processor time to the budget machine's."""
    return min(_fixed_work() for _ in range(7)) / REFERENCE_S


def over_budget(files: Mapping[str, Spent], budget: Mapping[str, float], factor: float) -> str:
    """Returns a table of the budget and the used processor seconds, by folder and in total."""
    folders = by_folder(files, [folder_of(key) for key in budget])
    allowed = {folder_of(key): seconds * factor for key, seconds in budget.items()}
    lines = [f"{'budget':>9} {'processor':>9} {'tests':>6}  folder (this machine: {factor:.2f})"]
    lines += [
        f"{allowed.get(name, 0):9.1f} {spent.processor:9.1f} {spent.tests:6}  {name or 'others'}"
        for name, spent in folders.items()
    ]
    total, most = sum(key.processor for key in folders.values()), sum(allowed.values())
    lines.append(f"{most:9.1f} {total:9.1f} {'':6}  all")
    return "\n".join(lines)


def total_of(files: Mapping[str, Spent]) -> float:
    """Returns the processor seconds of all tests."""
    return sum(spent.processor for spent in files.values())


def main() -> int:
    """Prints the tables; with --budget only the table of the budget.

    Returns 1 if the budget is exceeded and --budget is given, or if there is no record.
    """
    parser = argparse.ArgumentParser(description="where the time of the last `make test` went")
    parser.add_argument("record", type=Path)
    parser.add_argument("--count", type=int, default=40, help="rows of each table")
    parser.add_argument("--budget", action="store_true", help="fail where the budget is exceeded")
    options = parser.parse_args()
    if not options.record.is_file():
        print(f"{options.record} does not exist; run `make test` first", file=sys.stderr)
        return 1
    tests = read(options.record)
    files = by_file(tests)
    budget, factor = tiers().budget, machine_factor()
    print(over_budget(files, budget, factor))
    if options.budget:
        spent, most = total_of(files), factor * sum(budget.values())
        if spent > most:
            print(
                f"`make test` used {spent:.0f} s of processor time, more than its budget of "
                f"{most:.0f} s: make tests cheaper, or leave cases to `make test-all` in "
                "tests/tiers.toml",
                file=sys.stderr,
            )
        return int(spent > most)
    print(table("file", files.items(), options.count))
    named = ((f"{file}::{name}", spent) for (file, name), spent in tests.items())
    print(table("test", named, options.count))
    return 0


if __name__ == "__main__":
    sys.exit(main())
