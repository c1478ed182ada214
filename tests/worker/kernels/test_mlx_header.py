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
    (library,) = [path for path in libraries if path.is_file()]
    flags = mlx_header.compiler_flags(library)
    assert any(flag.startswith("-std=") for flag in flags) and "-fPIC" in flags


def write_package(folder: Path, header_text: str) -> Path:
    """Writes a fake MLX package without its RECORD file; returns the package's folder."""
    package = folder / "mlx"
    header = package / "include" / mlx_header.HEADER
    header.parent.mkdir(parents=True)
    header.write_text(header_text)
    library = package / "lib" / "libmlx.so"
    library.parent.mkdir()
    library.write_bytes(b"\0\1 g++ -std=c++17 -O3 -Wall -fPIC -shared {} \0")
    return package


def write_record(folder: Path) -> Path:
    """Writes the package's RECORD file, as pip does; returns its path."""
    record = folder / "mlx_cpu-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"mlx/lib/libmlx.so,,\nmlx/include/{mlx_header.HEADER},sha256=x,3\n")
    return record


def test_the_precompiled_header_is_a_file_of_the_package(tmp_path: Path) -> None:
    """The precompiled header is listed in RECORD, so that pip deletes it with the package.

    If it stayed, g++ would use it in place of a newer version's header.
    """
    package = write_package(tmp_path, "inline int one() { return 1; }\n")
    record = write_record(tmp_path)
    before = record.read_text()
    for _ in range(2):
        mlx_header.precompile(package)
        assert record.read_text() == f"{before}mlx/include/{mlx_header.HEADER}.gch,,\n"


def test_a_header_that_is_not_compiled_leaves_everything_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path, "this is no C++\n")
    record = write_record(tmp_path)
    before = record.read_text()
    mlx_header.precompile(package)
    assert record.read_text() == before and "is not precompiled" in capsys.readouterr().err
    header = package / "include" / mlx_header.HEADER
    assert [*header.parent.iterdir()] == [header]


def test_a_header_of_no_package_is_left_alone(tmp_path: Path) -> None:
    package = write_package(tmp_path, "inline int one() { return 1; }\n")
    mlx_header.precompile(package)
    header = package / "include" / mlx_header.HEADER
    assert [*header.parent.iterdir()] == [header]


def test_the_compiler_takes_the_precompiled_header(tmp_path: Path) -> None:
    package = write_package(tmp_path, "inline int one() { return 1; }\n")
    write_record(tmp_path)
    header, library = package / "include" / mlx_header.HEADER, package / "lib" / "libmlx.so"
    mlx_header.precompile(package)
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
