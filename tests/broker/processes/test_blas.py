"""Where OpenBLAS is looked for, and which variable makes a worker load it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpool.broker.processes import blas


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system that has its libraries in one folder, which is empty."""
    monkeypatch.delenv("MLXPOOL_OPENBLAS", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(blas, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "mips")
    return tmp_path


def library(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_without_a_library_nothing_is_preloaded(folder: Path) -> None:
    assert blas.find() is None
    assert blas.preload() == {}


def test_openblas_is_found_in_the_usual_folders(folder: Path) -> None:
    plain = library(folder, "libopenblas.so.0")
    assert blas.find() == plain
    better = library(folder, "mips-linux-gnu/openblas-pthread/libblas.so.3")
    assert blas.find() == better
    assert blas.preload() == {"LD_PRELOAD": str(better)}


def test_it_comes_before_what_was_preloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library(folder, "libopenblas.so")
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert blas.preload() == {"LD_PRELOAD": f"{path}:/lib/other.so"}


def test_the_environment_names_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(folder, "libopenblas.so")
    mine = library(folder, "mine/any.so")
    monkeypatch.setenv("MLXPOOL_OPENBLAS", str(mine))
    assert blas.find() == mine


@pytest.mark.parametrize("value", ["", "/nowhere/lib.so"])
def test_an_empty_or_missing_path_turns_the_preload_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    library(folder, "libopenblas.so")
    monkeypatch.setenv("MLXPOOL_OPENBLAS", value)
    assert blas.find() is None
    assert blas.preload() == {}


def test_only_linux_preloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(folder, "libopenblas.so")
    monkeypatch.setattr("sys.platform", "darwin")
    assert blas.preload() == {}
