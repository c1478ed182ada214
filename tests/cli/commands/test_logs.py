"""`mlxpool logs`: the last lines of a file, and later lines."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from mlxpool.cli.commands import logs
from mlxpool.common.paths import log_slot, worker_log
from support.commands import run_here


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.mark.parametrize("slot", ["demo/0", "org/a-model/12", "50%/1", "a%2Fb/0"])
def test_a_slot_is_read_from_the_name_of_its_log(slot: str, tmp_path: Path) -> None:
    assert log_slot(worker_log(tmp_path, slot)) == slot


@pytest.mark.parametrize("block", [1, 3, 1 << 16])
@pytest.mark.parametrize(
    ("text", "lines", "shown"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 5, "a\nb\n"),
        ("a\n\n\n", 2, "\n\n"),
        ("a\nb\n", 0, "a\nb\n"),
        ("", 3, ""),
    ],
)
def test_the_last_lines(
    text: str, lines: int, shown: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    file = tmp_path / "log"
    file.write_text(text)
    assert b"".join(logs.parts(file, lines, follow=False)).decode() == shown


def test_what_is_appended_and_what_replaces_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log"
    file.write_text("first\n")
    texts = iter(["first\nsecond\n", "new\n"])
    monkeypatch.setattr("time.sleep", lambda _: file.write_text(next(texts)))
    shown = logs.parts(file, 10, follow=True)
    assert list(itertools.islice(shown, 3)) == [b"first\n", b"second\n", b"new\n"]


def test_without_a_slot_all_logs_are_listed(run_dir: Path) -> None:
    worker_log(run_dir, "org/m/0").write_text("12345")
    done = run_here(("--run-dir", str(run_dir), "logs"), {}, None)
    assert done.returncode == 0 and done.stdout.startswith("org/m/0  5 B")


def test_a_slot_without_a_log_is_named_with_those_that_have_one(run_dir: Path) -> None:
    worker_log(run_dir, "demo/0").write_text("one\ntwo\n")
    done = run_here(("--run-dir", str(run_dir), "logs", "demo/1"), {}, None)
    assert done.returncode == 2 and "'demo/1'" in done.stderr and "demo/0" in done.stderr
    done = run_here(("--run-dir", str(run_dir), "logs", "demo/0", "-n", "1"), {}, None)
    assert (done.returncode, done.stdout) == (0, "two\n")
