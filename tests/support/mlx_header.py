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


def main() -> int:
    """Writes the precompiled header beside the header; without g++ or the header, does nothing."""
    package = importlib.util.find_spec("mlx")
    for folder in package.submodule_search_locations or () if package else ():
        header, library = Path(folder) / "include" / HEADER, Path(folder) / "lib" / "libmlx.so"
        if header.is_file() and library.is_file() and shutil.which("g++"):
            flags = compiler_flags(library)
            part = header.with_suffix(".part")
            command = ["g++", *flags, "-x", "c++-header", f"-I{Path(folder) / 'include'}"]
            subprocess.run([*command, str(header), "-o", str(part)], check=True)
            part.replace(header.with_suffix(".h.gch"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
