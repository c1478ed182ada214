"""Finds OpenBLAS for workers on a Linux CPU.

MLX's Linux wheel links the reference BLAS, which is some thirty times slower in float32. Both
export the same symbols, so it is enough to load OpenBLAS first.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/OpenBLAS/lib")
_NAMES = (
    "openblas-pthread/libblas.so.3",
    "openblas-openmp/libblas.so.3",
    "openblas-serial/libblas.so.3",
    "libopenblas.so.0",
    "libopenblas.so",
)


def find() -> Path | None:
    """The library file: $MLXPOOL_OPENBLAS ("": none), else in the usual folders."""
    named = os.environ.get("MLXPOOL_OPENBLAS")
    if named is not None:
        return Path(named) if named and Path(named).is_file() else None
    machine = f"{platform.machine()}-linux-gnu"
    for folder in FOLDERS:
        for name in _NAMES:
            for path in (Path(folder, machine, name), Path(folder, name)):
                if path.is_file():
                    return path
    return None


def preload() -> dict[str, str]:
    """The environment variables that load OpenBLAS first; empty where it was not found."""
    library = find() if sys.platform == "linux" else None
    if library is None:
        return {}
    before = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{before}" if before else str(library)}
