"""NVIDIA's runtime compiler (NVRTC), from the library that MLX installs.

NVRTC's manual describes its functions under "User Interface". Run as a program, this module
compiles one kernel: it reads the arguments of `compile_kernel` from stdin as JSON, and writes three
lines to stdout: the machine code in base64, the kernel's name and its mangled name.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
COMPILE_SECONDS = 300.0  # the most seconds of a compiling process


class Compiler:
    """Compiles kernels for one GPU architecture."""

    def __init__(
        self,
        library: ctypes.CDLL,
        architecture: str,
        includes: Sequence[Path],
        headers: Mapping[str, str],
    ) -> None:
        """`architecture`: the GPU's, for example sm_90a.

        `includes`: folders of headers. `headers`: the texts of further headers, by name.
        """
        self.architecture = architecture
        self.includes = tuple(includes)
        self.headers = dict(headers)
        self._library = library
        self.options = [
            b"--device-as-default-execution-space",
            f"--gpu-architecture={architecture}".encode(),
            *(f"--include-path={path}".encode() for path in includes),
        ]

    @property
    def version(self) -> str:
        """The version of NVRTC, for example 13.0."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def machine_code(self, kernel: str, code: str) -> tuple[bytes, str, str]:
        """Compiles the only kernel of `code`; returns machine code, kernel name and mangled name.

        Raises RuntimeError with the message of the compiler.
        """
        program, name = ctypes.c_void_p(), kernel.encode()
        count = len(self.headers)
        self._call(
            "CreateProgram",
            ctypes.byref(program),
            code.encode(),
            b"kernel.cu",
            count,
            (ctypes.c_char_p * count)(*(text.encode() for text in self.headers.values())),
            (ctypes.c_char_p * count)(*(file.encode() for file in self.headers)),
        )
        try:
            self._call("AddNameExpression", program, name)
            options = (ctypes.c_char_p * len(self.options))(*self.options)
            try:
                self._call("CompileProgram", program, len(self.options), options)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}: {self._text(program, 'ProgramLog')!r:.2000}"
                ) from None
            mangled = ctypes.c_char_p()
            self._call("GetLoweredName", program, name, ctypes.byref(mangled))
            return self._text(program, "CUBIN"), kernel, (mangled.value or b"").decode()
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, text)
        return text.raw

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, f"nvrtc{function}")(*arguments)
        if code:
            say = self._library.nvrtcGetErrorString
            say.restype = ctypes.c_char_p
            raise RuntimeError(f"nvrtc{function}: {say(code).decode()}")


def loaded() -> ctypes.CDLL:
    """Returns the NVRTC library that MLX has loaded. Raises OSError if MLX has loaded none."""
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    raise OSError(f"MLX has loaded none of {', '.join(LIBRARIES)}")


def includes() -> list[Path]:
    """Returns the folders of CUDA's headers: MLX's or the system's.

    Raises OSError if there are no such folders.
    """
    packages = Path(sys.modules["mlx.core"].__file__ or "").parents[1] / "nvidia"
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [packages / "cu13", packages / "cuda_runtime", *(Path(home) for home in homes if home)]
    folders = [
        place / "include" for place in places if (place / "include" / "cuda_fp16.h").exists()
    ]
    if not folders:
        raise OSError(f"CUDA's headers are in none of {', '.join(map(str, places))}")
    return folders


def in_process(compiler: Compiler, kernel: str, code: str) -> tuple[bytes, str, str]:
    """Returns the result of `compiler.machine_code` from a new process.

    So several kernels are compiled at a time: a process compiles only one. Raises RuntimeError with
    the message of the compiler, OSError or SubprocessError.
    """
    includes = [*map(str, compiler.includes)]
    arguments = library_path(), compiler.architecture, includes, compiler.headers, kernel, code
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps(arguments).encode(),
        capture_output=True,
        check=False,
        timeout=COMPILE_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-2000:])
    machine_code, name, mangled = done.stdout.decode().splitlines()
    return base64.b64decode(machine_code), name, mangled


def library_path() -> str:
    """Returns the file of MLX's loaded NVRTC library. Raises OSError if MLX has loaded none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.rstrip().partition("/")[2]
            if Path(path).name in LIBRARIES:
                return f"/{path}"
    raise OSError(f"MLX has loaded none of {', '.join(LIBRARIES)}")


def compile_kernel(
    library: str,
    architecture: str,
    includes: Sequence[str],
    headers: Mapping[str, str],
    kernel: str,
    code: str,
) -> tuple[bytes, str, str]:
    """Compiles a kernel with the NVRTC library in the file `library`, see Compiler."""
    compiler = Compiler(ctypes.CDLL(library), architecture, [*map(Path, includes)], headers)
    return compiler.machine_code(kernel, code)


if __name__ == "__main__":
    machine_code, *names = compile_kernel(*json.load(sys.stdin))
    print(base64.b64encode(machine_code).decode(), *names, sep="\n")
