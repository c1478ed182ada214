"""The tests that `make test` selects, and its budget of processor time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import slowest, steady
from support.slowest import Spent
from support.tiers import TESTS, Tiers, tiers

CASES = [("a/test_x.py", f"test_one[{n}]") for n in range(3)] + [("a/test_x.py", "test_two")]


def table(full: dict[str, str] | None = None, first: dict[str, int] | None = None) -> Tiers:
    return Tiers(full or {}, first or {}, {})


def test_without_a_line_of_the_table_all_cases_run() -> None:
    assert all(table().kept(CASES))


@pytest.mark.parametrize("key", ["a", "a/test_x.py", "a/test_x.py::test_one"])
def test_a_folder_file_or_function_runs_its_first_cases(key: str) -> None:
    assert table(first={key: 2}).kept(CASES) == [True, True, False, True]


def test_the_line_nearest_to_a_function_counts() -> None:
    kept = table(first={"a": 1, "a/test_x.py::test_one": 3}).kept(CASES)
    assert kept == [True, True, True, True]


def test_a_file_or_function_can_be_left_out() -> None:
    assert table(full={"a/test_x.py": "why"}).kept(CASES) == [False] * 4
    assert table(full={"a/test_x.py::test_one": "why"}).kept(CASES) == [False] * 3 + [True]


def test_keys_of_no_test_are_named() -> None:
    tier_table = table({"a/test_x.py::test_two": "", "a/test_y.py": ""}, {"a": 1, "b": 1})
    assert tier_table.unknown(CASES) == ["a/test_y.py", "b"]


def collected(*words: str) -> list[tuple[str, str]]:
    """Returns the tests, as (file, name), that pytest collects with these arguments."""
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (line.partition("::") for line in done.stdout.splitlines() if "::" in line)
    return [(file.removeprefix("tests/"), name.split("::")[-1]) for file, _, name in lines]


def test_each_function_has_a_case_in_make_test_but_for_those_of_the_table() -> None:
    """Each function without a case in `make test` is in the table of tests/tiers.toml.

    The table names no file or function that does not exist.
    """
    everything = collected("--full")
    assert tiers().unknown(everything) == []
    kept = tiers().kept(everything)
    functions = {(file, name.partition("[")[0]) for file, name in everything}
    run = {
        (file, name.partition("[")[0])
        for (file, name), here in zip(everything, kept, strict=True)
        if here
    }
    for file, function in functions - run:
        assert file in tiers().full or f"{file}::{function}" in tiers().full, (file, function)


def test_a_file_that_is_named_runs_whole() -> None:
    file = next(key for key in tiers().full if "::" not in key and "chaos" in key)
    assert collected(f"tests/{file}")
    assert not any(path == file for path, _ in collected("tests/chaos"))


def test_seconds_are_charged_to_the_innermost_folder() -> None:
    files = {"tests/a/b/test_x.py": Spent(1, 2), "tests/a/test_y.py": Spent(1, 3)}
    folders = slowest.by_folder(files, ["tests/a", "tests/a/b"])
    assert {name: spent.processor for name, spent in folders.items()} == {
        "tests/a": 3, "tests/a/b": 2, "": 0
    }  # fmt: skip


def record(tmp_path: Path, seconds: float) -> Path:
    """Writes a report of one test with this processor time, in seconds; returns its path."""
    file = tmp_path / "seconds.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="tests.broker.test_x" name="test_y" time="1">'
        f'<properties><property name="processor_s" value="{seconds}"/></properties>'
        "</testcase></testsuite></testsuites>"
    )
    return file


@pytest.mark.parametrize(("share", "ended"), [(0.9, 0), (1.1, 1)])
def test_a_run_above_the_budget_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
    ended: int,
) -> None:
    monkeypatch.setattr(slowest, "machine_factor", lambda: 2.0)
    file = record(tmp_path, share * 2 * sum(tiers().budget.values()))
    monkeypatch.setattr(sys, "argv", ["slowest", str(file), "--budget"])
    assert slowest.main() == ended
    assert ("more than its budget" in capsys.readouterr().err) == bool(ended)


def test_steady_counts_the_runs_that_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fake `make` fails in its second run and names a failed test, as pytest does."""
    program = tmp_path / "make"
    program.write_text(
        f'#!/bin/sh\n[ -e {tmp_path}/again ] && echo "FAILED tests/t.py::test_x" && exit 2\n'
        f"touch {tmp_path}/again\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["steady", "--runs", "2", "--busy", "1"])
    assert steady.main() == 1
    out = capsys.readouterr().out
    assert "run 2" in out
    assert "tests/t.py::test_x" in out
    assert "1 of 2 runs passed" in out
    assert "tests/t.py::test_x" in (tmp_path / steady.LOGS / "steady-2.log").read_text()
