"""Tests the files that a load stores for later loads.

A file is read only with its own key, and is either complete or missing.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from mlxpool.worker.system import kept_files
from mlxpool.worker.system.kept_files import MAX_BYTES, MAX_FILES, KeptFile

KEY = {"model": "a", "context": 8}


def file_of(kept: KeptFile) -> Path:
    assert kept.path is not None
    return kept.path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "loads"


def test_a_file_is_read_for_its_kind_and_key_alone(caplog: pytest.LogCaptureFixture) -> None:
    KeptFile("times", KEY).write(b"1\n2")
    assert KeptFile("times", dict(reversed(KEY.items()))).read() == b"1\n2"
    assert KeptFile("times", {**KEY, "context": 9}).read() is None
    assert KeptFile("sizes", KEY).read() is None
    assert not caplog.records


@pytest.mark.parametrize("size", [0, 5, 40, -1])
def test_a_broken_file_is_logged_and_removed(size: int, caplog: pytest.LogCaptureFixture) -> None:
    kept = KeptFile("times", KEY)
    kept.write(b"12345")
    file = file_of(kept)
    file.write_bytes(file.read_bytes()[:size] + b"x")
    with caplog.at_level(logging.WARNING):
        assert kept.read() is None
    assert caplog.records[0].__dict__["file"] == str(file) and not file.exists()
    kept.write(b"6")
    assert kept.read() == b"6"


def test_a_file_under_the_name_of_another_key_is_not_read() -> None:
    kept, other = KeptFile("times", KEY), KeptFile("times", {})
    kept.write(b"1")
    file_of(kept).rename(file_of(other))
    assert other.read() is None


@pytest.mark.parametrize("kind", ["pipe", "device", "huge"])
def test_what_is_no_small_file_is_not_read_and_is_replaced(kind: str) -> None:
    """Pipes, devices and huge files are replaced without being read."""
    kept = KeptFile("times", KEY)
    kept.write(b"1")
    file = file_of(kept)
    if kind == "huge":
        os.truncate(file, MAX_BYTES + 1)
    else:
        file.unlink()
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    assert kept.read() is None
    kept.write(b"2")
    assert kept.read() == b"2"


def test_several_processes_may_write_and_read_at_once(folder: Path) -> None:
    def work(number: int) -> bytes | None:
        kept = KeptFile("times", KEY)
        kept.write(bytes([number]) * 10_000)
        return kept.read()

    with ThreadPoolExecutor(8) as pool:
        contents = list(pool.map(work, range(100)))
    assert all(content is not None and content == content[:1] * 10_000 for content in contents)
    assert len(list(folder.iterdir())) == 1


def test_the_least_recently_used_files_are_removed(folder: Path) -> None:
    first = KeptFile("times", KEY)
    first.write(b"1")
    for number in range(MAX_FILES):
        KeptFile("times", {"number": number}).write(b"2")
        assert first.read() == b"1"
    assert len(list(folder.iterdir())) == MAX_FILES
    assert KeptFile("times", {"number": 0}).read() is None


def test_a_new_file_is_kept_beside_files_of_a_clock_that_was_ahead(folder: Path) -> None:
    future = time.time() + 10**6
    for number in range(MAX_FILES):
        other = KeptFile("times", {"number": number})
        other.write(b"1")
        os.utime(file_of(other), (future, future))
    for kind in ("times", "sizes"):
        KeptFile(kind, KEY).write(b"2")
    assert KeptFile("times", KEY).read() == KeptFile("sizes", KEY).read() == b"2"
    assert len(list(folder.iterdir())) == MAX_FILES


def test_a_folder_among_the_files_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a folder").mkdir(parents=True)
    os.utime(folder / "a folder", (0, 0))
    for number in range(MAX_FILES + 2):
        KeptFile("times", {"number": number}).write(b"1")
    assert len(list(folder.iterdir())) == MAX_FILES + 1 and not caplog.records


def test_a_folder_that_cannot_be_written_is_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        KeptFile("times", KEY).write(b"1")
    assert "not kept" in caplog.text


def test_nothing_is_kept_in_a_folder_that_others_can_open(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    kept = KeptFile("times", KEY)
    kept.write(b"1")
    assert kept.read() is None and not folder.exists() and not caplog.records


def test_the_machines_key_changes_with_its_blas_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blas, compiler = tmp_path / "libblas.so", tmp_path / "g++"
    keys = []

    def note() -> None:
        kept_files.machine.cache_clear()
        keys.append(kept_files.machine())

    monkeypatch.setenv("PATH", str(tmp_path))
    note()
    monkeypatch.setenv("MLX_DISABLE_COMPILE", "1")  # passes then need another amount of memory
    note()
    monkeypatch.setenv("LD_PRELOAD", str(blas))
    note()
    blas.write_text("a newer version")
    note()
    compiler.touch(mode=0o755)
    note()
    kept_files.machine.cache_clear()
    assert all(key != other for key, other in pairwise(keys))


def test_the_machines_key_changes_with_our_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "worker" / "__init__.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr("mlxpool.worker.__file__", str(module))
    keys = []
    for text in ("", "x = 1"):
        module.with_name("layers.py").write_text(text)
        kept_files.code.cache_clear()
        keys.append(kept_files.code())
    kept_files.code.cache_clear()
    assert keys[0] != keys[1]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_any_name_and_a_link_to_nothing_have_a_place_in_our_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of our source also covers file names with any bytes, and broken links.

    Editors leave broken links beside a file in use.
    """
    module = tmp_path / os.fsdecode(b"caf\xe9") / "__init__.py"
    module.parent.mkdir()
    module.with_name(".#layers.py").symlink_to("me@here.1:2")
    monkeypatch.setattr("mlxpool.worker.__file__", str(module))
    kept_files.code.cache_clear()
    assert kept_files.code()
    kept_files.code.cache_clear()
