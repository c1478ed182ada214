"""Builds kernels from .cu files and constants."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_cache import (
    CUDA_FOLDER,
    TYPES,
    KernelText,
    build_key,
    compiling,
    is_rehearsing,
    with_disk_cache,
)

log = logging.getLogger("mlxpool.worker")

Constant = int | float | mx.Dtype
HALF_DTYPES = (mx.float16, mx.bfloat16)  # dtypes of tensor cores
FLOAT_DTYPES = (mx.float32, *HALF_DTYPES)
HEADERS = ("common.cuh", "machine.cuh", "tensor.cuh")
WARP_SIZE = 32  # threads of a warp
WRITE_THREADS = 256  # threads of a thread block of `write_in_place`


def build_kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, Constant],
    *,
    contiguous: bool = False,
    shared: int = 0,
    header: str = "",
    bounds: tuple[int, int] | None = None,
    ends: Sequence[str] = (),
) -> Any:
    """Builds the kernel of `name`.cu with these constants by mx.fast.cuda_kernel.

    Each input costs time on the host at each launch. So if a call passes None for an input, the
    kernel is built without it, and the input's name is a null pointer (const N*) in the source.
    `contiguous`: MLX copies inputs that are not contiguous; not for kernels that write into inputs
    or use strides. `shared`: bytes of shared memory, besides memory declared in the source.
    `header`: code before the kernel. `ends`: files after the kernel's source. `bounds`: CUDA's
    launch bounds, the most threads of a block and the fewest resident blocks of a multiprocessor.
    """
    names = tuple(inputs)

    def make(text: KernelText) -> Any:
        return mx.fast.cuda_kernel(
            name=text.name,
            input_names=list(text.inputs),
            output_names=list(text.outputs),
            header=text.header,
            source=text.source,
            ensure_row_contiguous=contiguous,
            shared_memory=shared,
        )

    @cache
    def without(*absent: str) -> Any:
        present = [each for each in names if each not in absent]
        text = KernelText(
            name=f"mlxpool_{name}",
            inputs=tuple(present),
            outputs=tuple(outputs),
            header=f"// {build_key()}\n"
            + "".join(map(include_line, HEADERS))
            + header
            + ("" if bounds is None else launch_bounds(*bounds)),
            source=declarations(constants)
            + "".join(f"constexpr const N* {each} = nullptr;\n" for each in absent)
            + source_text(name, present)
            + "".join(map(include_line, ends)),
        )
        return with_disk_cache(text, make)

    def call(*, inputs: Sequence[mx.array | None], **more: Any) -> Any:
        absent = (each for each, array in zip(names, inputs, strict=True) if array is None)
        return without(*absent)(inputs=[array for array in inputs if array is not None], **more)

    return call


def write_in_place(kernel: Any, inputs: Sequence[mx.array], count: int) -> mx.array:
    """Runs a kernel that writes into its inputs, with at least `count` threads.

    Returns the array `done` [1] of 0. Readers of the written inputs must depend on it, see the
    package.
    """
    outputs: list[mx.array] = kernel(
        inputs=list(inputs),
        grid=(-(-count // WRITE_THREADS) * WRITE_THREADS, 1, 1),
        threadgroup=(WRITE_THREADS, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return outputs[0]


def launch_bounds(threads: int, blocks: int) -> str:
    """Returns code that redefines `__global__` in MLX's source, to add launch bounds."""
    marked = f"__attribute__((global)) __attribute__((launch_bounds({threads}, {blocks})))"
    return f"#undef __global__\n#define __global__ {marked}\n"


def source_text(name: str, inputs: Sequence[str]) -> str:
    """Returns a short source that includes `name`.cu, because MLX hashes a source at each launch.

    MLX passes to a kernel only the shapes and strides that its source names. So the short source
    names all shapes and strides that the file uses.
    """
    text = (CUDA_FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    words = (f"{each}_{kind}" for each in inputs for kind in ("shape", "strides"))
    return f"// {' '.join(word for word in words if word in text)}\n{include_line(f'{name}.cu')}"


def include_line(file: str) -> str:
    """Returns the line that includes a file of CUDA_FOLDER."""
    return f'#include "{CUDA_FOLDER / file}"\n'


def name_files(files: Mapping[str, str]) -> str:
    """Returns macros that map names to paths of files, for `#include NAME` in a C++ block."""
    return "".join(f'#define {name} "{CUDA_FOLDER / file}"\n' for name, file in files.items())


def declarations(constants: Mapping[str, Constant]) -> str:
    """Returns the constants in C++; a dtype becomes a type."""
    return "".join(f"{_declaration(name, value)};\n" for name, value in constants.items())


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]}"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"constexpr int {name} = {value}"
    return f"constexpr float {name} = {value!r}f"


def warps_of(pieces: int, most: int) -> int:
    """Returns the number of warps, at most `most`, that divide `pieces` evenly.

    If possible, each warp gets 4 or more pieces.
    """
    fitting = [n for n in range(most, 0, -1) if pieces % n == 0]
    return next((n for n in fitting if pieces // n >= 4), fitting[-1])


def kernel_works(what: str, trial: Callable[[], bool]) -> bool:
    """Returns whether a kernel compiles here and `trial` returns True; logs a warning if not.

    Inside `kernel_cache.rehearsing` the function only lists the kernels that `trial` calls, and
    returns True.
    """
    if not mx.cuda.is_available():
        return False
    if is_rehearsing():
        with suppress(Exception):  # the trial may fail: a rehearsal's results are all zeros
            trial()
        return True
    try:
        with compiling():
            right = trial()
    except (RuntimeError, ValueError) as error:
        log.warning(
            "our CUDA kernel for %s does not work here, the slow way is taken: %s", what, error
        )
        return False
    if not right:
        log.warning("our CUDA kernel for %s gives something else here, the slow way is taken", what)
    return right
