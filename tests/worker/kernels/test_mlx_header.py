"""The header of the kernels that MLX compiles for a CPU, precompiled for the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import mlx_header

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only there MLX compiles for a CPU"),
    pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed"),
]


def test_the_flags_are_those_of_mlx() -> None:
    libraries = [Path(folder) / "lib" / "libmlx.so" for folder in sys.modules["mlx"].__path__]
    (library,) = [one for one in libraries if one.is_file()]
    flags = mlx_header.compiler_flags(library)
    assert any(flag.startswith("-std=") for flag in flags) and "-fPIC" in flags


def test_the_compiler_takes_the_precompiled_header(tmp_path: Path) -> None:
    header = tmp_path / "include" / mlx_header.HEADER
    header.parent.mkdir(parents=True)
    header.write_text("inline int one() { return 1; }\n")
    library = tmp_path / "lib" / "libmlx.so"
    library.parent.mkdir()
    library.write_bytes(b"\0\1 g++ -std=c++17 -O3 -Wall -fPIC -shared {} \0")
    mlx_header.precompile(tmp_path)
    assert [path.name for path in header.parent.iterdir() if path != header] == [
        f"{header.name}.gch"
    ]
    source = tmp_path / "kernel.cpp"
    source.write_text(f'#include "{mlx_header.HEADER}"\nint two() {{ return 2 * one(); }}\n')
    flags = mlx_header.compiler_flags(library)
    done = subprocess.run(
        [
            *("g++", *flags, "-shared", "-H", "-I", str(header.parents[3])),
            *(str(source), "-o", str(tmp_path / "kernel.so")),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"! {header}.gch" in done.stderr, done.stderr


def test_nothing_is_written_without_the_header(tmp_path: Path) -> None:
    mlx_header.precompile(tmp_path)
    assert not list(tmp_path.iterdir())
