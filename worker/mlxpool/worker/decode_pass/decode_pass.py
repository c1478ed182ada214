"""Computes a whole pass by one kernel, if every line of the pass gets logits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.decode_pass import kernel
from mlxpool.worker.decode_pass.addresses import addresses_of
from mlxpool.worker.decode_pass.kernel import LAYER_NUMBERS, MAX_LINES, PassArrays
from mlxpool.worker.decode_pass.model_weights import PassWeights
from mlxpool.worker.kernels import ragged_attention
from mlxpool.worker.kernels.device import evaluate_in_own_memory
from mlxpool.worker.kernels.work_list import EXTRA_ITEMS

STATE_NUMBERS = 3  # numbers of the barrier's state, see grid_barrier.cuh


class PassMemory(Struct, frozen=True):
    """The memory that a pass uses besides weights.

    `pools`: keys and values of each layer. `windows`: lines of layer n see the last `windows[n]`
    keys; 0: all. `tables`: the block tables of rows. `turns`: the angular frequencies of the
    rotation.
    """

    pools: Sequence[tuple[mx.array, ...]]
    windows: Sequence[int]
    tables: mx.array
    turns: npt.NDArray[np.float32]


class DecodePass:
    """The kernel for a model, and memory that successive launches use."""

    def __init__(self, weights: PassWeights, memory: PassMemory, blocks: int) -> None:
        """`blocks`: the thread blocks of a launch, all resident at the same time.

        The caller must keep references to the weights and pools, because the kernel reads their
        addresses from a table. Raises ValueError if the numbers of a weight or a pool are not
        contiguous.
        """
        self._shape, self._blocks = weights.shape, blocks
        self._arrays = _arrays(weights, memory)
        self._writes_first = {each: mx.array([each], dtype=mx.int32) for each in (False, True)}
        mx.eval(*self._writes_first.values())

    def __call__(
        self,
        plan: mx.array,
        drawn: mx.array,
        lines: int,
        *,
        follow: bool = False,
        gives_up: bool = False,
    ) -> mx.array:
        """Returns hidden states [lines, hidden] of at most MAX_LINES lines, see `kernel.launch`.

        `follow`: a row may have several lines, such as drafts.
        """
        arrays, first = self._arrays, self._writes_first[follow]
        return kernel.launch(
            self._shape, plan, drawn, lines, arrays, self._blocks, first, gives_up=gives_up
        )


def _arrays(weights: PassWeights, memory: PassMemory) -> PassArrays:
    """Allocates the memory of launches, and makes the table of addresses."""
    shape, lines = weights.shape, MAX_LINES
    splits = zip(kernel.splits_of(shape), shape.products, strict=True)
    parts = max(count * rows for count, (rows, _) in splits)
    turned, dtype = shape.rope.dims // 2, shape.dtype
    arrays = PassArrays(
        embedding=weights.embedding,
        layers=mx.array(_table(weights, memory)),
        turns=mx.array(memory.turns),
        tables=memory.tables,
        state=mx.zeros((STATE_NUMBERS,), dtype=mx.int32),
        numbers=mx.zeros((5 * lines + 8 * (lines + EXTRA_ITEMS),), dtype=mx.int32),
        cosines=mx.zeros((lines, turned)),
        sines=mx.zeros((lines, turned)),
        residual=mx.zeros((lines, shape.hidden), dtype=dtype),
        normed=mx.zeros((lines, shape.hidden), dtype=dtype),
        attended=mx.zeros((lines, shape.queries), dtype=dtype),
        gates=mx.zeros((lines, shape.width), dtype=dtype),
        partial=mx.zeros((lines * parts,)),
        sums=ragged_attention.part_sums(shape.kv_heads, shape.size),
        arrived=ragged_attention.counters(shape.kv_heads),
    )
    evaluate_in_own_memory(arrays.inputs())
    return arrays


def _table(weights: PassWeights, memory: PassMemory) -> npt.NDArray[np.int64]:
    """Returns the table [layers + 1, LAYER_NUMBERS] of addresses and windows for decode_pass.cu.

    It has a row for each layer, then a row with the address of the last norm.
    """
    arrays: list[mx.array] = []
    for layer, pools in zip(weights.layers, memory.pools, strict=True):
        arrays += [*layer.arrays(), *pools]
    addresses = addresses_of([*arrays, weights.norm])
    if addresses is None:
        raise ValueError("the numbers of a weight are not contiguous")
    *of_layers, last = addresses
    table = np.zeros((len(weights.layers) + 1, LAYER_NUMBERS), dtype=np.int64)
    table[:-1, :-1] = np.array(of_layers).reshape(len(weights.layers), -1)
    table[:-1, -1] = memory.windows
    table[-1, 0] = last
    return table
