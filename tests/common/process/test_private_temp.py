"""Only their user may reach the temporary folder of processes that compute."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.process import private_temp
from mlxpool.common.process.private_temp import INHERITED, KERNELS, TEMPORARY, UnsafeFolder

ROOT = Path(__file__).parents[3]
VARIABLES = (
    TEMPORARY, KERNELS, INHERITED, "CACHE_DIRECTORY", "XDG_CACHE_HOME", "MLXPOOL_RUN_DIR",
)  # fmt: skip


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of all users, with the variables of a login shell."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv(TEMPORARY, str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(private_temp, "_kept_open", [])
    return folder


@pytest.fixture
def without_home(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of `shared`, if the folder of caches cannot be made."""
    file = shared.parent / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    return shared


def test_it_is_one_of_the_users_caches_and_stays_at_the_next_start(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = private_temp.use()
    assert first.parent == shared.parent / "cache" / "mlxpool" and first.name.startswith("tmp-")
    assert mode_of(first) == mode_of(first.parent) == 0o700
    assert os.environ[TEMPORARY] == str(first)
    assert private_temp.use() == first, "of a process that this one starts"
    monkeypatch.setenv(TEMPORARY, str(shared))
    assert private_temp.use() == first, "at the next start"
    assert not list(shared.iterdir())


def test_a_folder_that_is_private_already_is_kept(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = shared / "mine"
    own.mkdir(mode=0o700)
    monkeypatch.setenv(TEMPORARY, str(own))
    assert private_temp.use() == own
    own.chmod(0o750)
    assert private_temp.use() != own


def test_a_user_without_a_home_has_a_folder_in_the_temporary_one(
    without_home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is locked, so that no cleaner removes it and nobody else takes its name."""
    with caplog.at_level(logging.WARNING):
        folder = private_temp.use()
    assert folder == without_home / f"mlxpool-{os.getuid()}" and mode_of(folder) == 0o700
    assert not caplog.records
    cleaner = os.open(folder, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
    os.close(*private_temp._kept_open)


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_container_that_can_write_to_the_run_directory_alone(
    without_home: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    (without_home / f"mlxpool-{os.getuid()}").touch()  # a file, so it cannot contain folders
    run_dir = without_home.parent / "run"
    if by_variable:
        monkeypatch.setenv("MLXPOOL_RUN_DIR", str(run_dir))
    folder = private_temp.use(None if by_variable else run_dir)
    assert folder == run_dir / "tmp" and mode_of(folder) == mode_of(run_dir) == 0o700


def test_where_no_folder_can_be_made_the_error_names_the_variable(
    without_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (without_home / f"mlxpool-{os.getuid()}").touch()

    def fails(**given: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("tempfile.mkdtemp", fails)
    with pytest.raises(OSError, match="set TMPDIR to a folder that this user can write to"):
        private_temp.use()


def test_a_tmpdir_that_does_not_exist_is_left_out(
    without_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TEMPORARY, str(without_home / "nothing"))
    assert private_temp.shared_folder() == Path("/tmp")


def test_where_no_folder_is_safe_a_fresh_one_is_made_and_inherited(
    without_home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In this test another user has taken the name of the folder in the temporary folder."""
    taken = without_home / f"mlxpool-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    ended: list[tuple[Any, Path, int]] = []
    monkeypatch.setattr("atexit.register", lambda *given: ended.append(given))
    with caplog.at_level(logging.WARNING):
        fresh = private_temp.use()
    assert fresh.parent == without_home and fresh != taken and mode_of(fresh) == 0o700
    assert "compiled kernels are not kept" in caplog.text and "rm -r" in caplog.text
    without_home.chmod(0o777)  # as in a pod, where the next process has no better folder
    assert private_temp.use() == fresh
    os.close(*private_temp._kept_open)
    ((remove, folder, owner),) = ended
    remove(folder, owner + 1)
    assert fresh.exists(), "a forked child leaves it"
    remove(folder, owner)
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("writable", "has the mode 0770, with which other users may have put code there: rm -r"),
        ("link", "is no folder"),
        ("file", "is no folder"),
        ("above", r"can be replaced by other users: .*/shared belongs .* has the mode 0777"),
        ("foreign", r"belongs to the user \d+, and this process runs as \d+"),
    ],
)
def test_what_others_may_have_written_is_not_used(
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wrong: str,
    why: str,
) -> None:
    """A folder into which others may write is used neither as TMPDIR nor for GPU kernels."""
    folder = shared.parent / "shared" / "kernels"
    folder.mkdir(parents=True, mode=0o700)
    user = os.getuid()
    if wrong == "writable":
        folder.chmod(0o770)
    elif wrong == "above":
        folder.parent.chmod(0o777)
    elif wrong == "foreign":
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    else:
        folder.rmdir()
        folder.touch() if wrong == "file" else folder.symlink_to(shared.parent)
    with pytest.raises(UnsafeFolder, match=why):
        private_temp.make_private(folder)
    monkeypatch.setattr(os, "getuid", lambda: user)
    if wrong == "foreign":
        return
    monkeypatch.setenv(KERNELS, str(folder))
    with caplog.at_level(logging.WARNING):
        used = private_temp.use()
    assert KERNELS not in os.environ and re.search(why, caplog.text)
    monkeypatch.setenv(TEMPORARY, str(folder))
    if wrong != "file":  # if `folder` is a file, it cannot contain files
        assert private_temp.use() == used


def test_a_named_folder_of_gpu_kernels_is_closed_to_other_readers(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = shared.parent / "kernels"
    kernels.mkdir()
    kernels.chmod(0o755)
    (kernels / "kept.ptx").touch()
    monkeypatch.setenv(KERNELS, str(kernels))
    private_temp.use()
    assert os.environ[KERNELS] == str(kernels)
    assert mode_of(kernels) == 0o700 and (kernels / "kept.ptx").exists()


# ---- the attack ----------------------------------------------------------------------------------

COMPUTE = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + mx.tanh(x))(mx.ones((3,))))
"""
SAFE = "from mlxpool.worker.system.mlx_environment import set_mlx_environment as use\nuse()"
PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run() { fclose(fopen(MARK, "w")); }
"""


def computing(program: str, temporary: Path) -> None:
    environment = {**os.environ, TEMPORARY: str(temporary)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns relative paths of the shared libraries that MLX compiles for the code COMPUTE."""
    if sys.platform != "linux" or not shutil.which("g++"):
        pytest.skip("MLX compiles on a CPU under Linux, with g++")
    folder = tmp_path_factory.mktemp("names")
    computing(COMPUTE, folder)
    return [str(file.relative_to(folder)) for file in folder.rglob("*.so")]


@pytest.fixture
def planted(shared: Path, names: list[str]) -> Iterator[Path]:
    """Plants foreign libraries; returns the path of the file that they write when loaded."""
    mark = shared.parent / "mark"
    source = shared.parent / "planted.cpp"
    source.write_text(PLANTED.replace("MARK", f'"{mark}"'))
    library = source.with_suffix(".so")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    for name in names:
        place = shared / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, place)
    yield mark


def test_a_library_that_another_user_planted_is_not_loaded(shared: Path, planted: Path) -> None:
    """A process that sets TMPDIR does not load the planted library; without TMPDIR it does."""
    computing(f"{SAFE}\n{COMPUTE}", shared)
    assert not planted.exists()
    with pytest.raises(subprocess.CalledProcessError):
        computing(COMPUTE, shared)  # the planted library lacks MLX's function
    assert planted.exists()


# ---- every process -------------------------------------------------------------------------------

COMPUTES = re.compile(
    r"import mlx\.core|mlxpool\.bench\.our_engine|mlxpool\.worker\.(engine|compute)"
)
SETS = re.compile(r"private_temp\.use\([\w.]*\)|set_mlx_environment\(\)")
# Programs whose parent processes set TMPDIR.
CHILDREN = {
    "worker/mlxpool/worker/kernels/nvrtc.py",
    "worker/mlxpool/worker/preparation/fork_server.py",
    "bench/mlxpool/bench/mlx_lm.py",
}


def programs() -> Iterator[Path]:
    """Yields the files of programs in this tree that use MLX or start processes that use MLX."""
    for package in ("bench", "broker", "cluster", "gateway", "worker"):
        for file in sorted((ROOT / package).rglob("*.py")):
            text = file.read_text("utf-8")
            if '__name__ == "__main__"' in text:
                starts = file.name == "__main__.py" and package != "bench"
                if starts or COMPUTES.search(text):
                    yield file
    for command in ("gateway", "serve"):
        yield ROOT / f"client/mlxpool/cli/commands/{command}.py"
    yield ROOT / "bench/mlxpool/bench/cli.py"


def test_every_program_that_computes_sets_it() -> None:
    missing, seen = [], 0
    for file in programs():
        name = str(file.relative_to(ROOT))
        if name not in CHILDREN:
            text = file.read_text("utf-8")
            seen += 1
            if not SETS.search(text):
                missing.append(name)
    assert not missing and seen > 5


def test_no_module_is_imported_from_the_folder_in_which_a_program_was_started() -> None:
    """Programs start Python with `-P`.

    Otherwise `python -m` searches this folder first, where anybody may have put a file.
    """
    started = re.compile(r'sys\.executable, "-m"')
    packages = ("bench", "broker", "client", "cluster", "common", "gateway", "worker")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 400
    assert not [str(file) for file in files if started.search(file.read_text("utf-8"))]
