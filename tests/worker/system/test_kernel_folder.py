"""The folder of compiled GPU kernels belongs to the worker's user alone."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from mlxpool.worker.system import kernel_folder
from mlxpool.worker.system.kernel_folder import VARIABLE, UnsafeFolder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, which every user may write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_the_default_is_a_folder_of_this_user(temporary: Path) -> None:
    environment: dict[str, str] = {}
    for _ in range(2):  # loads
        assert kernel_folder.use_private_folder(environment) is None
        folder = Path(environment.pop(VARIABLE))
        assert folder == kernel_folder.default_folder()
        assert temporary / f"mlxpool-{os.getuid()}" in folder.parents
        while folder != temporary:
            assert mode_of(folder) == 0o700
            folder = folder.parent


@pytest.mark.parametrize(
    ("installed", "needed"),
    [({"mlx-cpu"}, False), ({"mlx-cuda-13"}, True), ({"mlx-cpu", "mlx-cuda-12"}, True), ({}, True)],
)
def test_where_mlx_computes_on_the_cpu_no_folder_is_made(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], needed: bool
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(kernel_folder, "_installed", lambda package: package in installed)
    assert kernel_folder.needed() is needed
    monkeypatch.setattr("sys.platform", "darwin")
    assert not kernel_folder.needed()


def test_a_named_folder_is_closed_to_other_readers(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "kept.ptx").touch()
    environment = {VARIABLE: str(folder)}
    assert kernel_folder.use_private_folder(environment) is None
    assert environment == {VARIABLE: str(folder)}
    assert mode_of(folder) == 0o700 and (folder / "kept.ptx").exists()


def test_without_a_cache_of_kernels_there_is_no_folder(temporary: Path) -> None:
    environment = {VARIABLE: ""}
    assert kernel_folder.use_private_folder(environment) is None
    assert environment == {VARIABLE: ""} and not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("writable", "has the mode 0770, with which other users may have put kernels there: rm -r"),
        ("link", "is no folder; name another folder with MLX_PTX_CACHE_DIR"),
        ("file", "is no folder"),
        ("above", r"can be replaced by other users: .*/shared belongs .* has the mode 0777"),
        ("foreign", r"belongs to the user \d+, and this process runs as \d+; name another"),
    ],
)
def test_what_others_may_have_written_is_not_used(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: str,
    why: str,
) -> None:
    """A fresh folder is used instead, which the process removes."""
    folder = tmp_path / "shared" / "kernels"
    folder.mkdir(parents=True)
    if wrong == "writable":
        folder.chmod(0o770)
    elif wrong == "above":
        folder.parent.chmod(0o777)
    elif wrong == "foreign":
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    else:
        folder.rmdir()
        folder.touch() if wrong == "file" else folder.symlink_to(tmp_path)
    with pytest.raises(UnsafeFolder, match=why):
        kernel_folder.make_private(folder)
    environment = {VARIABLE: str(folder)}
    with caplog.at_level(logging.WARNING):
        fresh = kernel_folder.use_private_folder(environment)
    assert fresh is not None and fresh.parent == temporary and mode_of(fresh) == 0o700
    assert environment == {VARIABLE: str(fresh)}
    assert "compiled kernels are not kept, each load compiles them: " in caplog.text
    (fresh / "kernel.ptx").touch()
    kernel_folder.remove(fresh)
    kernel_folder.remove(None)
    assert not list(temporary.iterdir())
