"""Precompiles the header that MLX includes in each kernel that it compiles for a CPU.

Under Linux MLX has g++ compile a kernel for each new combination of operations: 0.4 s of a
processor, of which the header takes 0.3 s. The tests need 230 kernels on a machine that has none.

`make` runs this once, in the environment that it makes. g++ does not notice when the header is
replaced by that of another MLX, so the file is added to those of the package: pip deletes it with
the header.
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
    """The flags of g++ in MLX's library; g++ takes a precompiled header only with the same ones."""
    found = re.search(rb"g\+\+ (-[ -~]*?) -shared \{\}", library.read_bytes())
    return found[1].decode().split() if found else []


def record_of(header: Path, site_packages: Path) -> Path | None:
    """The list of the files of the package that has the header; None: no package manager has it."""
    name = header.relative_to(site_packages).as_posix()
    for info in site_packages.glob("*.dist-info"):
        files = importlib.metadata.Distribution.at(info).files or ()
        if (info / "RECORD").is_file() and any(file.as_posix() == name for file in files):
            return info / "RECORD"
    return None


def add_to_record(record: Path, name: str) -> None:
    """Adds a file, of whatever content, to the files of a package, unless it is one of them."""
    lines = record.read_text(encoding="utf-8").splitlines()
    if not any(line.startswith(f"{name},") for line in lines):
        part = record.with_name("RECORD.part")
        part.write_text("\n".join([*lines, f"{name},,", ""]), encoding="utf-8")
        part.replace(record)


def precompile(package: Path) -> None:
    """Writes the precompiled header beside the header.

    Does nothing without g++, the header, or a list of the package's files. Raises OSError where
    these may not be written.
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
    """Precompiles the header of the MLX that is installed. A failure is printed, no error."""
    spec = importlib.util.find_spec("mlx")
    for location in spec.submodule_search_locations or () if spec else ():
        try:
            precompile(Path(location))
        except OSError as error:
            print(f"MLX's header is not precompiled: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
