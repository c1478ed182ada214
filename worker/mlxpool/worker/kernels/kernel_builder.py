"""From a .cu file and constants to a kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_cache import ROOM, TYPES, Text, edition, stored

log = logging.getLogger("mlxpool.worker")

Constant = int | float | mx.Dtype
HALVES = (mx.float16, mx.bfloat16)  # what tensor cores multiply
FLOATS = (mx.float32, *HALVES)
HEADERS = ("common.cuh", "machine.cuh", "tensor.cuh")
LANES = 32  # threads of a warp


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, Constant],
    *,
    whole: bool = False,
    shared: int = 0,
    header: str = "",
    bounds: tuple[int, int] | None = None,
    end: str = "",
) -> Any:
    """The kernel of `name`.cu with these constants, as mx.fast.cuda_kernel makes it.

    `whole`: it reads whole contiguous arrays, and is given copies of others. One that writes into
    its inputs, or follows their strides, is not. `shared`: bytes of memory that a thread block
    shares, besides what its text declares. `header`: functions that stand before it.
    `end`: a file that comes after it. `bounds`: its threads, and the thread blocks that a
    multiprocessor shall have room for.
    """
    text = Text(
        name=f"mlxpool_{name}",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        header=f"// {edition()}\n"
        + "".join(map(included, HEADERS))
        + header
        + ("" if bounds is None else bound(*bounds)),
        source=declared(constants) + body(name, inputs) + (included(end) if end else ""),
    )
    made: Any = mx.fast.cuda_kernel(
        name=text.name,
        input_names=list(inputs),
        output_names=list(outputs),
        header=text.header,
        source=text.source,
        ensure_row_contiguous=whole,
        shared_memory=shared,
    )
    return stored(text, made)


def bound(threads: int, blocks: int) -> str:
    """What makes the compiler spare registers; MLX writes the kernel's head, but for this word."""
    marked = f"__attribute__((global)) __attribute__((launch_bounds({threads}, {blocks})))"
    return f"#undef __global__\n#define __global__ {marked}\n"


def body(name: str, inputs: Sequence[str]) -> str:
    """A few characters that stand for `name`.cu: MLX reads all of a kernel's in every step.

    It gives a kernel the shapes and strides of inputs whose names it finds in them.
    """
    text = (ROOM / f"{name}.cu").read_text(encoding="utf-8")
    every = (f"{one}_{kind}" for one in inputs for kind in ("shape", "strides"))
    return f"// {' '.join(one for one in every if one in text)}\n{included(f'{name}.cu')}"


def included(file: str) -> str:
    """The line that brings in a file of this room."""
    return f'#include "{ROOM / file}"\n'


def declared(constants: Mapping[str, Constant]) -> str:
    """The constants in C++; a dtype becomes a type."""
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
    """Of a thread block: as many as share the pieces evenly, with some for each to do."""
    fitting = [n for n in (16, 8, 4, 2, 1) if n <= most and pieces % n == 0]
    return next((n for n in fitting if pieces // n >= 4), fitting[-1])


def works(what: str, trial: Callable[[], bool]) -> bool:
    """Whether a kernel compiles here and `trial` finds it right; if not, the log says so."""
    if not mx.cuda.is_available():
        return False
    try:
        right = trial()
    except (RuntimeError, ValueError) as error:
        log.warning(
            "our CUDA kernel for %s does not work here, the slow way is taken: %s", what, error
        )
        return False
    if not right:
        log.warning("our CUDA kernel for %s gives something else here, the slow way is taken", what)
    return right
