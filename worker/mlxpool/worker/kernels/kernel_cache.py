"""Compiled kernels on disk, where MLX looks for them.

MLX compiles what mx.fast.cuda_kernel is given in every process anew, more than a second for each of
some 40 kernels, most of it for headers that ours do not need, and keeps none of it. But it looks
into its cache's folder before it compiles. So our kernels are compiled here, without these headers,
and lie there under the names by which MLX will ask for them: a worker that starts again compiles
nothing. Wherever something is in the way, MLX compiles as it always does.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels import nvrtc

log = logging.getLogger("mlxpool.worker")

SERIES = "0.32."  # of MLX, whose names and whose way to pass shapes are known here
ROOM = Path(__file__).parent / "cuda"
TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
}
# What MLX puts around a kernel, and what our kernels use of the headers that it brings in. A shape
# is passed as ten numbers, however many it has.
BEFORE = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
OPENED = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
CLOSED = "\n}\n\n} // namespace mlx::core::cu\n"
SPACE = "mlx::core::cu::"
HEADERS = {
    "mlx/backend/cuda/device/utils.cuh": """#pragma once
using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long;
using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned;
using uint64_t = unsigned long;
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace mlx::core::cu {
template <typename T> struct Ten {
  T at[10];
  __device__ T operator[](int i) const { return at[i]; }
};
using Shape = Ten<int32_t>;
using Strides = Ten<int64_t>;
}
""",
    "cooperative_groups.h": "#pragma once\nnamespace cooperative_groups {}\n",
}

Kind = tuple[mx.Dtype, bool]  # of an input: its type, and whether it has dimensions


@dataclass(frozen=True, slots=True)
class Text:
    """A kernel's, as mx.fast.cuda_kernel is given it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    source: str


def stored(text: Text, made: Callable[..., Any]) -> Callable[..., Any]:
    """What mx.fast.cuda_kernel made of the text; when it is called, its machine code is there."""

    def call(*, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], **more: Any) -> Any:
        _lay(text, tuple((x.dtype, x.ndim > 0) for x in inputs), tuple(output_dtypes))
        return made(inputs=inputs, output_dtypes=output_dtypes, **more)

    return call


@functools.cache
def edition() -> str:
    """Of all that decides what a text is compiled to; where any of it differs, names differ."""
    compiler = _compiler()
    with_what = "" if compiler is None else f"NVRTC {compiler.version} {compiler.architecture}"
    return f"{_texts()} MLX {_mlx()} {with_what}"


def _texts() -> str:
    """A hash of the files that kernels are made of, as they are now."""
    files = [path.read_bytes() for path in sorted(ROOM.glob("*.cu*"))]
    headers = [text.encode() for text in HEADERS.values()]
    return hashlib.sha256(b"".join([*files, *headers])).hexdigest()[:16]


def _mlx() -> str:
    """MLX's version; "" where it was installed without one."""
    try:
        return version("mlx")
    except PackageNotFoundError:
        return ""


@functools.cache
def _lay(text: Text, inputs: tuple[Kind, ...], outputs: tuple[mx.Dtype, ...]) -> None:
    compiler = _compiler()
    if compiler is None:
        return
    try:
        code = code_of(text, inputs, outputs)
        path = folder() / f"{module_of(text, code)}.ptx"
        if _whole(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} cannot be written to")
        found = compiler.machine_code(SPACE + name_of(text), code)
        if _texts() not in edition():  # they were read just now, under the name of the old ones
            raise RuntimeError("another edition of mlxpool was installed while this one runs")
        _write(path, *found)
    except Exception as error:  # whatever it is, there is another way
        log.info("MLX compiles our kernel %s by itself: %s", text.name, error)


def _whole(path: Path) -> bool:
    """Whether what lies there is what was written: a damaged file would fail in every process."""
    try:
        return path.with_suffix(".txt").read_bytes().endswith(_mark(path.read_bytes()))
    except OSError:
        return False


def _mark(code: bytes) -> bytes:
    """A line of the list of kernels that MLX does not heed: it has no tab."""
    return f"# {hashlib.sha256(code).hexdigest()}\n".encode()


def name_of(text: Text) -> str:
    """MLX's name of the kernel."""
    return f"custom_kernel_{text.name}"


def module_of(text: Text, code: str) -> str:
    """MLX's name of what `code` is compiled to."""
    return f"{name_of(text)}_{string_hash(code.encode()):x}"


def folder() -> Path:
    """Where MLX looks for compiled kernels. Raises OSError where it looks nowhere."""
    named = os.environ.get("MLX_PTX_CACHE_DIR")
    if named == "":
        raise OSError("MLX_PTX_CACHE_DIR is empty")
    temporary = (os.environ.get(name) for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    return Path(named or Path(next(filter(None, temporary), "/tmp")) / "mlx" / _mlx() / "ptx")


def code_of(text: Text, inputs: Iterable[Kind], outputs: Iterable[mx.Dtype]) -> str:
    """The text as MLX hands it to the compiler, to a letter. Raises KeyError for other types."""
    into = (
        f"    {TYPES[dtype]}* {name}" for name, dtype in zip(text.outputs, outputs, strict=True)
    )
    given = zip(text.inputs, inputs, strict=True)
    taken = (_parameter(text.source, name, *kind) for name, kind in given)
    parameters = "".join(taken) + ",\n".join(into)
    head = f"__global__ void {name_of(text)}(\n{parameters}) {{\n"
    return BEFORE + text.header + OPENED + head + text.source + CLOSED


def _parameter(source: str, name: str, dtype: mx.Dtype, dimensions: bool) -> str:
    kinds = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
    told = [kind for kind in kinds if dimensions and f"{name}_{kind}" in source]
    more = (f"    const __grid_constant__ {kinds[kind]} {name}_{kind},\n" for kind in told)
    return f"    const {TYPES[dtype]}* {name},\n" + "".join(more)


def string_hash(text: bytes) -> int:
    """std::hash<std::string> of GNU's C++ library with 64 bits: MurmurHash64A."""
    mask, by = 2**64 - 1, 0xC6A4A7935BD1E995
    mixed = 0xC70F6907 ^ len(text) * by & mask
    whole = len(text) // 8 * 8
    for at in range(0, whole, 8):
        piece = int.from_bytes(text[at : at + 8], "little") * by & mask
        mixed = (mixed ^ (piece ^ piece >> 47) * by & mask) * by & mask
    if whole < len(text):
        mixed = (mixed ^ int.from_bytes(text[whole:], "little")) * by & mask
    mixed = (mixed ^ mixed >> 47) * by & mask
    return mixed ^ mixed >> 47


def _write(path: Path, code: bytes, kernel: str, mangled: str) -> None:
    """Whole or not at all, the list of its kernels first: others may look for it right now."""
    for target, what in (
        (path.with_suffix(".txt"), f"{kernel}\t{mangled}\n".encode() + _mark(code)),
        (path, code),
    ):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".mlxpool-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(what)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@functools.cache
def _compiler() -> nvrtc.Compiler | None:
    """The one that MLX has loaded; None where there is none, and where MLX has to compile."""
    architecture = _architecture()
    if not architecture:
        return None
    try:
        if not _mlx().startswith(SERIES):
            raise RuntimeError(f"MLX {_mlx()} is not {SERIES}*")
        return nvrtc.Compiler(nvrtc.loaded(), architecture, nvrtc.includes(), HEADERS)
    except (OSError, RuntimeError) as error:
        log.info("our kernels are compiled by MLX in each process: %s", error)
        return None


def _architecture() -> str:
    """Of this GPU as compilers name it, "" without one; from 9.0 on with all it has."""
    if mx.default_device().type != mx.DeviceType.gpu or not mx.cuda.is_available():
        return ""
    name = str(mx.device_info().get("architecture", ""))
    number = name.removeprefix("sm_")
    if not number.isdigit():
        return ""
    return f"{name}a" if int(number) >= 90 else name
