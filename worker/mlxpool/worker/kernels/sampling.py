"""Samples tokens from logits by the rules of sampling/sampler.py, with a thread block per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from sys import byteorder
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.kernels.kernel_builder import FLOAT_DTYPES, Constant, build_kernel, kernel_works

INPUTS = ("logits", "options", "positions")
OPTIONS = 6  # length of a row of `options`
THREADS = 1024
KNOWN_THREADS = 256


@cache
def supports(size: int, dtype: mx.Dtype) -> bool:
    """Returns whether `sample_tokens` supports logits of `size` tokens and this dtype.

    The first call for each size and dtype compiles and tests the kernel.
    """
    return dtype in FLOAT_DTYPES and kernel_works("drawing tokens", lambda: _is_right(size, dtype))


def sample_tokens(
    logits: mx.array,
    options: mx.array,
    positions: mx.array,
    masks: mx.array | None = None,
) -> mx.array:
    """Returns sampled tokens [R] int32 of logits [R, V]; -1 for a row with NaN logits.

    `options` [R, OPTIONS] int32, made by `packed_options`. `positions` [R] int32: the positions of
    the tokens in their completions. `masks`: the tokens that each row may draw, in the format of
    TokenMasks.numbers; None: any token.
    """
    rows, size = logits.shape
    outputs: list[mx.array] = _kernel(size, logits.dtype, masks is not None)(
        inputs=[
            *(logits, options, positions),
            *(() if masks is None else (masks,)),
        ],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[mx.int32],
    )
    return outputs[0]


def packed_options(
    heats: Sequence[float],
    top_ks: Sequence[int],
    top_ps: Sequence[float],
    min_ps: Sequence[float],
    seeds: Sequence[int],
) -> npt.NDArray[np.int32]:
    """Returns the options of R rows as one array [R, OPTIONS], for one copy to the device.

    `heats`: temperatures; 0 chooses the likeliest token. A top-k of 0 and a top-p of 1 or more keep
    all tokens. Floats are stored as the bits of float32, a seed as its upper and its lower half.
    """
    options = np.empty((len(seeds), OPTIONS), dtype=np.int32)
    options[:, :3].view(np.float32)[:] = np.array((heats, top_ps, min_ps), dtype=np.float32).T
    options[:, 3] = top_ks
    halves = np.array(seeds, dtype=np.uint64).view(np.uint32).reshape(-1, 2)
    options[:, 4:].view(np.uint32)[:] = halves[:, ::-1] if byteorder == "little" else halves
    return options


def known_tokens(ids: mx.array, drawn: mx.array) -> mx.array:
    """Returns ids [T] int32; an id -1 - r is replaced by element r of `drawn` int32."""
    lines = ids.shape[0]
    outputs: list[mx.array] = _known_kernel()(
        inputs=[ids, drawn],
        grid=(-(-lines // KNOWN_THREADS) * KNOWN_THREADS, 1, 1),
        threadgroup=(KNOWN_THREADS, 1, 1),
        output_shapes=[(lines,)],
        output_dtypes=[mx.int32],
    )
    return outputs[0]


@cache
def _known_kernel() -> Any:
    return build_kernel("known_tokens", ["ids", "drawn"], ["known"], {}, contiguous=True)


@cache
def _kernel(size: int, dtype: mx.Dtype, masked: bool) -> Any:
    constants: dict[str, Constant] = {
        "SIZE": size,
        "THREADS": THREADS,
        "OPTIONS": OPTIONS,
        "N": dtype,
    }
    inputs, header = ((*INPUTS, "masks"), "#define MASKED\n") if masked else (INPUTS, "")
    return build_kernel("sampling", inputs, ["token"], constants, contiguous=True, header=header)


def _is_right(size: int, dtype: mx.Dtype) -> bool:
    logits = mx.random.normal((2, size), key=mx.random.key(7)).astype(dtype)
    options = mx.array(packed_options([0, 0], [0, 0], [2, 2], [0, 0], [0, 0]))
    tokens = sample_tokens(logits, options, mx.zeros((2,), dtype=mx.int32))
    return bool(mx.array_equal(tokens, mx.argmax(logits, axis=-1).astype(mx.int32)).item())
