"""From a .cu file and constants to a kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

log = logging.getLogger("mlxpool.worker")

Constant = int | float | mx.Dtype
TYPES = {mx.float32: "float", mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
HALVES = (mx.float16, mx.bfloat16)  # what tensor cores multiply
HEADERS = ("common.cuh", "tensor.cuh")
LANES = 32  # threads of a warp


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    constants: Mapping[str, Constant],
    *,
    whole: bool = False,
    shared: int = 0,
) -> Any:
    """The kernel of `name`.cu with these constants, as mx.fast.cuda_kernel makes it.

    `whole`: it reads whole contiguous arrays, and is given copies of others. One that writes into
    its inputs, or follows their strides, is not. `shared`: bytes of memory that a thread block
    shares, besides what its text declares.
    """
    return mx.fast.cuda_kernel(
        name=f"mlxpool_{name}",
        input_names=list(inputs),
        output_names=list(outputs),
        header="".join(map(text, HEADERS)),
        source=f"{declared(constants)}{text(f'{name}.cu')}",
        ensure_row_contiguous=whole,
        shared_memory=shared,
    )


@cache
def text(file: str) -> str:
    """A file of this room without its comments: MLX looks at every character in every step."""
    lines = files(__package__).joinpath(file).read_text(encoding="utf-8").splitlines()
    kept = [line.split("//")[0].rstrip() for line in lines]
    return "".join(f"{line}\n" for line in kept if line)


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
