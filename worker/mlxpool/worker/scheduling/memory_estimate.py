"""Estimates the memory that a model takes from its files. Pure; a running worker measures it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.weights.inspect import FLOAT_BYTES, ModelFolder, dequantised_growth
from mlxpool.worker.weights.safetensors_header import Tensor

MAX_DEQUANTISED_SHARE = 0.25  # of a worker's limit, for weights that are dequantised at load
PREFIX_CACHE_SHARE = 4  # by default the prefix cache gets 1 / 4 of what weights leave
# Tokens of a draft model's row: the newest of a stream are nearly all that drafts depend on.
MAX_DRAFT_CONTEXT = 1024
DTYPE_NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class MemoryEstimate(Struct, frozen=True):
    """Bytes, but for `context` (tokens) and `sequences`.

    Temporary memory of a step and the process itself are not included: a worker measures both at
    load.
    """

    context: int
    sequences: int
    weights: int
    token: int  # keys and values of one token in all layers
    fixed: int  # of a sequence of any length: windows and states
    sequence: int  # of one sequence with a full context
    all_sequences: int
    prefix_cache: int  # at most; it uses free memory and gives it back

    @property
    def least(self) -> int:
        """The bytes for one sequence with a full context and an empty prefix cache."""
        return self.weights + self.sequence

    def context_within(self, limit: int) -> int:
        """Tokens of one sequence that fit beside the weights, at most its context."""
        return min(self.context, max(0, limit - self.weights - self.fixed) // max(self.token, 1))


def estimate_memory(
    folder: ModelFolder,
    *,
    context: int,
    sequences: int,
    prefix_cache: str,
    prefix_bytes: int,
    limit: int,
    chunk: int,
    float32: bool,
    deterministic: bool = False,
    kv: str = AUTO,
) -> MemoryEstimate:
    """Estimates the memory of a model within `limit`, the bytes that a worker may take.

    `chunk` is the largest number of prompt tokens in a step. `float32`: the worker computes with
    4-byte numbers, as on a CPU. `kv`: what rows store, see caches/stored.py.
    """
    width = 4 if float32 else FLOAT_BYTES[main_dtype(folder.tensors.values())]
    weights = _weight_bytes(folder, width)
    if deterministic or dequantises_at_load(folder, limit=limit, float32=float32):
        weights += dequantised_growth(folder, width, deterministic=deterministic)
    token = sum(cache.token_bytes(width, kv) for cache in folder.plan.caches)
    if folder.plan.prediction_cache is not None:
        token += folder.plan.prediction_cache.token_bytes(width)
    fixed = sum(cache.fixed_bytes(width, chunk, kv) for cache in folder.plan.caches)
    sequence = fixed + token * context
    cache = prefix_bytes or default_prefix_cache_bytes(limit, weights)
    return MemoryEstimate(
        context=context,
        sequences=sequences,
        weights=weights,
        token=token,
        fixed=fixed,
        sequence=sequence,
        all_sequences=sequence * sequences,
        prefix_cache=0 if prefix_cache == "off" else cache,
    )


def estimate_draft(folder: ModelFolder, *, sequences: int, limit: int, float32: bool) -> int:
    """Returns the bytes of the weights and of all rows of a draft model; see estimate_memory."""
    context = min(folder.context, MAX_DRAFT_CONTEXT)
    need = estimate_memory(
        folder,
        context=context,
        sequences=sequences,
        prefix_cache="off",
        prefix_bytes=0,
        limit=limit,
        chunk=context,
        float32=float32,
    )
    return need.weights + need.all_sequences


def default_prefix_cache_bytes(limit: int, weights: int) -> int:
    """Bytes of the prefix cache where no setting says so: a share of what weights leave."""
    return max(0, limit - weights) // PREFIX_CACHE_SHARE


def dequantises_at_load(folder: ModelFolder, *, limit: int, float32: bool) -> bool:
    """Whether quantised weights are dequantised once, at load, instead of in every product.

    They are on a CPU, whose BLAS has only dense products, where they take up to
    MAX_DEQUANTISED_SHARE of the limit.
    """
    if not float32 or not folder.match.layouts:
        return False
    width = FLOAT_BYTES["F32"]
    dequantised = _weight_bytes(folder, width) + dequantised_growth(folder, width)
    return dequantised <= MAX_DEQUANTISED_SHARE * limit


def _weight_bytes(folder: ModelFolder, width: int) -> int:
    stored = sum(_in_memory(tensor, width) for tensor in folder.tensors.values())
    return stored + folder.plan.built * width


def main_dtype(tensors: Iterable[Tensor]) -> str:
    """The dtype of most bytes of the floating-point weights; F32 where there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_BYTES:
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _in_memory(tensor: Tensor, width: int) -> int:
    """Bytes in memory: floating-point numbers get `width` bytes, packed ones keep theirs."""
    return math.prod(tensor.shape) * width if tensor.dtype in FLOAT_BYTES else tensor.nbytes
