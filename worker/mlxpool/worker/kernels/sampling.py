"""Samples tokens from logits by the rules of sampling/sampler.py, one thread block a row."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import FLOAT_DTYPES, Constant, build_kernel, kernel_works

INPUTS = ("logits", "heats", "top_ks", "top_ps", "min_ps", "seeds", "positions")
THREADS = 1024
KNOWN_THREADS = 256


@cache
def supports(size: int, dtype: mx.Dtype) -> bool:
    """Returns whether `sample_tokens` supports a vocabulary of `size`; the first call tries it."""
    return dtype in FLOAT_DTYPES and kernel_works("drawing tokens", lambda: _is_right(size, dtype))


def sample_tokens(
    logits: mx.array,
    heats: mx.array,
    top_ks: mx.array,
    top_ps: mx.array,
    min_ps: mx.array,
    seeds: mx.array,
    positions: mx.array,
    masks: mx.array | None = None,
) -> mx.array:
    """Returns tokens [R] int32 of logits [R, V], -1 where logits are not numbers.

    `heats` [R] are temperatures, 0: the likeliest token; `top_ks` [R] int32, 0: off; `top_ps` [R],
    1 or more: off; `min_ps` [R]; `seeds` [R, 2] uint32, the upper half first; `positions` [R] int32
    of the tokens in their completions. `masks`: see TokenMasks.numbers.
    """
    rows, size = logits.shape
    found: list[mx.array] = _kernel(size, logits.dtype, masks is not None)(
        inputs=[
            *(logits, heats, top_ks, top_ps, min_ps, seeds, positions),
            *(() if masks is None else (masks,)),
        ],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


def known_tokens(ids: mx.array, drawn: mx.array) -> mx.array:
    """Returns ids [T] int32, where an id -1 - r is replaced by element r of `drawn` int32."""
    lines = ids.shape[0]
    found: list[mx.array] = _known_kernel()(
        inputs=[ids, drawn],
        grid=(-(-lines // KNOWN_THREADS) * KNOWN_THREADS, 1, 1),
        threadgroup=(KNOWN_THREADS, 1, 1),
        output_shapes=[(lines,)],
        output_dtypes=[mx.int32],
    )
    return found[0]


@cache
def _known_kernel() -> Any:
    return build_kernel("known_tokens", ["ids", "drawn"], ["known"], {}, contiguous=True)


@cache
def _kernel(size: int, dtype: mx.Dtype, masked: bool) -> Any:
    constants: dict[str, Constant] = {"SIZE": size, "THREADS": THREADS, "N": dtype}
    inputs, header = ((*INPUTS, "masks"), "#define MASKED\n") if masked else (INPUTS, "")
    return build_kernel("sampling", inputs, ["token"], constants, contiguous=True, header=header)


def _is_right(size: int, dtype: mx.Dtype) -> bool:
    logits = mx.random.normal((2, size), key=mx.random.key(7)).astype(dtype)
    zeros = mx.zeros((2,), dtype=mx.int32)
    none = zeros.astype(mx.float32)
    seeds = mx.zeros((2, 2), dtype=mx.uint32)
    tokens = sample_tokens(logits, none, zeros, none + 2, none, seeds, zeros)
    return bool(mx.array_equal(tokens, mx.argmax(logits, axis=-1).astype(mx.int32)).item())
