"""Decides whether a decode pass is computed by one kernel or by a kernel for each operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.decode_pass import trial
from mlxpool.worker.decode_pass.decode_pass import DecodePass, PassMemory
from mlxpool.worker.decode_pass.kernel import MAX_LINES
from mlxpool.worker.decode_pass.model_weights import weights_of
from mlxpool.worker.kernels import device, matmul_tiled
from mlxpool.worker.layers.layer_types import Rope
from mlxpool.worker.layers.model_plan import Model

log = logging.getLogger("mlxpool.worker")

MIN_MULTIPROCESSORS = matmul_tiled.FULL_GPU_BLOCKS  # each one computes a tile of each product
STORED_AS_THEY_ARE = 2  # how many arrays a layer has without scales: keys and values


def serves(lines: int) -> bool:
    """Returns whether a DecodePass computes passes of `lines` tokens that all get logits."""
    return lines <= MAX_LINES


def decode_pass_of(
    model: Model,
    dtype: mx.Dtype,
    pools: Sequence[tuple[mx.array, ...]],
    windows: Sequence[int],
    tables: mx.array,
    turns_of: Callable[[Rope], npt.NDArray[np.float32]],
) -> DecodePass | None:
    """Returns the single kernel that computes whole decode passes of a model.

    Returns None if the model needs a kernel for each operation; logs the decision and its reason.
    `serves` decides for each pass. `dtype` is the dtype of `pools`; `turns_of` returns the angular
    frequencies of a rotary embedding; see PassMemory for the other parameters.
    """
    weights = weights_of(model, dtype)
    why = weights if isinstance(weights, str) else missing(dtype, pools)
    if not why and not isinstance(weights, str):
        memory = PassMemory(pools, windows, tables, turns_of(weights.shape.rope))
        try:
            decode_pass = DecodePass(weights, memory, device.multiprocessors())
        except ValueError as error:
            why = str(error)
        else:
            log.info("one kernel computes a decode pass", extra={"rows": MAX_LINES})
            return decode_pass
    log.info("a decode pass has a kernel for each operation", extra={"why": why})
    return None


def missing(dtype: mx.Dtype, pools: Sequence[tuple[mx.array, ...]]) -> str:
    """Returns why the kernel does not support these pools or this device; "" if it does."""
    if any(len(arrays) != STORED_AS_THEY_ARE for arrays in pools):
        return "keys and values are stored as integers"
    count = device.multiprocessors()
    if count < MIN_MULTIPROCESSORS:
        return f"the GPU has {count} multiprocessors, fewer than {MIN_MULTIPROCESSORS}"
    if device.shares_multiprocessors():  # thread blocks may then wait for ever for others
        return "other processes use the GPU at the same time (MPS)"
    return "" if trial.works(dtype) else "its kernel does not work here"
