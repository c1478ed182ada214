"""Precompiles the header that MLX includes in each kernel that it compiles for a CPU.

Under Linux MLX has g++ compile a kernel for each new combination of operations: 0.4 s of a
processor, of which the header takes 0.3 s. The tests need 230 kernels on a machine that has none.

`make` runs this once, in the environment that it makes.
"""

from __future__ import annotations

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


def precompile(package: Path) -> None:
    """Writes the precompiled header beside the header; without g++ or the header, does nothing."""
    header, library = package / "include" / HEADER, package / "lib" / "libmlx.so"
    if not header.is_file() or not library.is_file() or not shutil.which("g++"):
        return
    part = header.with_suffix(".part")
    command = ["g++", *compiler_flags(library), "-x", "c++-header", f"-I{package / 'include'}"]
    done = subprocess.run([*command, str(header), "-o", str(part)], capture_output=True, text=True)
    if done.returncode:
        print(f"{header} is not precompiled:\n{done.stderr}", file=sys.stderr)
    else:
        part.replace(header.with_suffix(".h.gch"))


if __name__ == "__main__":
    spec = importlib.util.find_spec("mlx")
    for location in spec.submodule_search_locations or () if spec else ():
        precompile(Path(location))
