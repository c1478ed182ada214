"""Precompiles the header that MLX includes in each kernel that it compiles for a CPU.

On Linux MLX calls g++ to compile a kernel for each new combination of operations. A kernel takes
0.4 s of processor time, 0.3 s of it for the header. On a new machine the tests need 230 kernels.

`make` runs this module once in each new environment. g++ does not detect that another MLX has
replaced the header. So the precompiled file is added to the package's list of files: pip then
deletes it together with the header.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

HEADER = Path("mlx/backend/cpu/compiled_preamble.h")


def compiler_flags(library: Path) -> list[str]:
    """Returns the g++ flags that MLX's library contains; a precompiled header needs these flags."""
    match = re.search(rb"g\+\+ (-[ -~]*?) -shared \{\}", library.read_bytes())
    return match[1].decode().split() if match else []


def record_of(header: Path, site_packages: Path) -> Path | None:
    """Returns the list of files of the header's package; None without a package manager."""
    name = header.relative_to(site_packages).as_posix()
    for info in site_packages.glob("*.dist-info"):
        files = importlib.metadata.Distribution.at(info).files or ()
        if (info / "RECORD").is_file() and any(file.as_posix() == name for file in files):
            return info / "RECORD"
    return None


def add_to_record(record: Path, name: str) -> None:
    """Adds a file to a package's list of files, without a hash, unless the list has it."""
    lines = record.read_text(encoding="utf-8").splitlines()
    if not any(line.startswith(f"{name},") for line in lines):
        part = record.with_name("RECORD.part")
        part.write_text("\n".join([*lines, f"{name},,", ""]), encoding="utf-8")
        part.replace(record)


def precompile(package: Path) -> None:
    """Writes the precompiled header beside the header.

    Does nothing without g++, the header, or a list of the package's files. Raises OSError if the
    files cannot be written.
    """
    header, library = package / "include" / HEADER, package / "lib" / "libmlx.so"
    if not header.is_file() or not library.is_file() or not shutil.which("g++"):
        return
    record = record_of(header, package.parent)
    if record is None:
        return
    part = header.with_suffix(".part")
    command = ["g++", *compiler_flags(library), "-x", "c++-header", f"-I{package / 'include'}"]
    done = subprocess.run([*command, str(header), "-o", str(part)], capture_output=True, text=True)
    if done.returncode:
        print(f"{header} is not precompiled:\n{done.stderr}", file=sys.stderr)
    else:
        target = header.with_suffix(".h.gch")
        add_to_record(record, target.relative_to(package.parent).as_posix())
        part.replace(target)


def main() -> None:
    """Precompiles the header of the installed MLX. A failure is printed, but is not an error."""
    spec = importlib.util.find_spec("mlx")
    for location in spec.submodule_search_locations or () if spec else ():
        try:
            precompile(Path(location))
        except OSError as error:
            print(f"MLX's header is not precompiled: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
