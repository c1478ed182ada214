"""The gated delta net of one layer, for all spans of a pass: see layers/delta_rule.py.

One kernel computes the convolution, silu, the norms of queries and keys, decays, rates and the
delta rule. If no span has more than WHOLE_HEAD_TOKENS tokens, a thread block computes a whole head,
and the gated norm after the rule. Otherwise a thread block computes COLUMNS columns of a head, so
that more of the GPU computes a long chunk, and a second kernel computes the gated norm.

All numbers are float32. The sums of a token have a fixed order, for any division of its sequence
into spans and launches: from equal inputs, a chunk gives the same bits as its tokens one by one.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels.kernel_builder import (
    FLOAT_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    include_line,
)
from mlxpool.worker.kernels.recurrent.span_states import MAX_SOURCES, SpanStates

log = logging.getLogger("mlxpool.worker")

MAX_SIZE = 256  # numbers of a key or a value of a head
MAX_WHOLE_SIZE = 128  # size of a key if a thread block has a whole head: bounded by registers
MAX_WIDTH = 8  # tokens of the convolution
WHOLE_HEAD_TOKENS = 4  # the most tokens of spans for thread blocks with a whole head
COLUMNS = 32  # columns of the state in any other thread block
COLUMNS_PER_WARP = 8
# Warps that make the inputs of the next tokens, in a thread block with a whole head and in others.
WHOLE_PREPARERS, PREPARERS = 4, 6
LONG_TILE, SHORT_TILE = 16, 8  # tokens whose inputs are made together: bounded by shared memory
LONG_TILE_KEYS = 128  # the most numbers of a key with tiles of LONG_TILE
GROUP = 4  # tokens of a tile whose inputs a warp makes together, if chunks are long
L2_EPS = 1e-6  # added to the squared norm of a query or key
NORM_THREADS = 256  # threads of a thread block of the separate gated norm


class DeltaNetWeights(NamedTuple):
    """The weights of a layer: contiguous float32 arrays."""

    conv: mx.array  # [width, channels]
    log_speed: mx.array  # [heads]
    bias: mx.array  # [heads]
    gain: mx.array  # gain [value_dim] of the gated norm


class DeltaNetShape(Struct, frozen=True):
    """The sizes of a gated delta net.

    A line (the inputs of a token) has the queries, keys and values of all heads (the `channels`),
    then gates, rates and decays. There are `heads` value heads and `key_heads` key heads; a group
    of value heads shares the queries and keys of one key head. `width`: the tokens that the
    convolution reads. `eps`: the eps of the gated norm.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float

    @property
    def channels(self) -> int:
        """The number of channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def line(self) -> int:
        """The size of a line (the inputs of a token)."""
        return self.channels + self.heads * (self.value_dim + 2)

    @property
    def state(self) -> int:
        """The size of a state: the last inputs of the convolution, then the matrix of each head."""
        matrices = self.heads * self.key_dim * self.value_dim
        return (self.width - 1) * self.channels + matrices


def refusal(shape: DeltaNetShape, dtype: mx.Dtype) -> str:
    """Returns why the kernel does not support layers of `shape`; "" if it does."""
    for what, size in (("keys", shape.key_dim), ("values", shape.value_dim)):
        if size % WARP_SIZE or not 0 < size <= MAX_SIZE:
            return (
                f"{what} of a head have {size} numbers, and our kernel takes multiples of"
                f" {WARP_SIZE} up to {MAX_SIZE}"
            )
    if shape.heads % shape.key_heads:
        return f"{shape.heads} heads cannot share {shape.key_heads} key heads evenly"
    if not 1 <= shape.width <= MAX_WIDTH:
        return f"the convolution has {shape.width} tokens, and our kernel takes up to {MAX_WIDTH}"
    if dtype not in FLOAT_DTYPES:
        return f"inputs are {dtype}, and our kernel takes {', '.join(map(str, FLOAT_DTYPES))}"
    return ""


def delta_net(
    shape: DeltaNetShape, lines: mx.array, states: SpanStates, weights: DeltaNetWeights
) -> tuple[mx.array, mx.array]:
    """Returns outputs [T, heads * value_dim] of lines [T, shape.line], and the states after them.

    The states are [states.written, shape.state] in float32. Each token is in one span.
    """
    tokens, heads, dtype = lines.shape[0], shape.heads, lines.dtype
    small = max(shape.key_dim, shape.value_dim) <= MAX_WHOLE_SIZE
    whole = small and states.longest <= WHOLE_HEAD_TOKENS
    columns, threads = block_of(shape, whole=whole)
    sources = states.sources or (weights.bias,)  # any array, as no span reads it
    sources += sources[:1] * (MAX_SOURCES - len(sources))
    out, after = _delta_kernel(shape, whole, dtype)(
        inputs=[lines, states.plan, *weights, *sources],
        grid=(shape.value_dim // columns * threads, heads, states.plan.shape[0]),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, heads * shape.value_dim), (states.written, shape.state)],
        output_dtypes=[dtype if whole else mx.float32, mx.float32],
    )
    return (out if whole else _gated_norm(shape, out, lines, weights.gain)), after


def _gated_norm(shape: DeltaNetShape, x: mx.array, lines: mx.array, gain: mx.array) -> mx.array:
    """Returns the norm of each head of x [T, heads * value_dim] times silu(gates of `lines`)."""
    warps = x.shape[0] * shape.heads
    outputs: list[mx.array] = _norm_kernel(shape, lines.dtype)(
        inputs=[x, lines, gain],
        grid=(-(-warps * WARP_SIZE // NORM_THREADS) * NORM_THREADS, 1, 1),
        threadgroup=(NORM_THREADS, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[lines.dtype],
    )
    return outputs[0]


def block_of(shape: DeltaNetShape, *, whole: bool) -> tuple[int, int]:
    """Returns the state columns of a thread block, and the number of its threads."""
    columns, preparers = (shape.value_dim, WHOLE_PREPARERS) if whole else (COLUMNS, PREPARERS)
    return columns, (columns // COLUMNS_PER_WARP + preparers) * WARP_SIZE


@cache
def _delta_kernel(shape: DeltaNetShape, whole: bool, dtype: mx.Dtype) -> Any:
    columns, threads = block_of(shape, whole=whole)
    long = shape.key_dim <= LONG_TILE_KEYS
    constants: dict[str, Constant] = {
        "KEY": shape.key_dim,
        "VALUE": shape.value_dim,
        "HEADS": shape.heads,
        "RATIO": shape.heads // shape.key_heads,
        "WIDTH": shape.width,
        "COLUMNS": columns,
        "GATED": whole,
        "TILE": WHOLE_HEAD_TOKENS if whole else LONG_TILE if long else SHORT_TILE,
        "GROUP": 1 if whole else GROUP,
        "PREPARERS": WHOLE_PREPARERS if whole else PREPARERS,
        "SCALE": float(shape.key_dim**-0.5),
        "EPS": L2_EPS,
        "NORM_EPS": float(shape.eps),
        "N": dtype,
    }
    sources = [f"states{number}" for number in range(MAX_SOURCES)]
    return build_kernel(
        "gated_delta",
        ["lines", "plan", *_WEIGHTS, *sources],
        ["out", "after"],
        constants,
        contiguous=True,
        header=include_line("gated_norm.cuh"),
        bounds=(threads, 1),
    )


_WEIGHTS = ("conv", "speed", "bias", "gain")  # the kernel's names of DeltaNetWeights


@cache
def _norm_kernel(shape: DeltaNetShape, dtype: mx.Dtype) -> Any:
    constants: dict[str, Constant] = {
        "VALUE": shape.value_dim,
        "HEADS": shape.heads,
        "LINE": shape.line,
        "GATES": shape.channels,
        "NORM_EPS": float(shape.eps),
        "N": dtype,
    }
    return build_kernel(
        "gated_norm",
        ["x", "lines", "gain"],
        ["out"],
        constants,
        contiguous=True,
        header=include_line("gated_norm.cuh"),
    )
