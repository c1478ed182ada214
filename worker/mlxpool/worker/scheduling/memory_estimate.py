"""Estimates the memory of a model from its files; a running worker measures it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.weights.inspect import FLOAT_BYTES, ModelFolder, dequantised_growth
from mlxpool.worker.weights.safetensors_header import Tensor

# The fraction of a worker's memory limit for weights that are dequantised at load.
MAX_DEQUANTISED_SHARE = 0.25
PREFIX_CACHE_SHARE = 4  # by default the prefix cache gets 1 / 4 of the memory without the weights
# Tokens of a draft model's KV row: drafts depend mostly on the newest tokens of a stream.
MAX_DRAFT_CONTEXT = 1024
DTYPE_NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class MemoryEstimate(Struct, frozen=True):
    """The memory of a model in bytes.

    `context` is a number of tokens, `sequences` a number of sequences. The temporary memory of a
    step and the memory of the process itself are not included: a worker measures both at load.
    """

    context: int
    sequences: int
    weights: int
    token: int  # keys and values of one token in all layers
    fixed: int  # a sequence's memory beside its tokens: windows and states
    sequence: int  # one sequence with a full context
    all_sequences: int
    prefix_cache: int  # the most bytes of the prefix cache; it uses free memory and gives it back

    @property
    def least(self) -> int:
        """The bytes for one sequence with a full context and an empty prefix cache."""
        return self.weights + self.sequence

    def context_within(self, limit: int) -> int:
        """Returns how many tokens of one sequence fit beside the weights, at most the context."""
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
    """Estimates the memory of a model within `limit`, the memory limit of a worker in bytes.

    `chunk` is the largest number of prompt tokens in a step. `float32`: the worker computes with
    4-byte numbers, as on a CPU. `kv`: the format of cached keys and values, see caches/stored.py.
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
    """Returns the bytes of a draft model's weights and KV rows; see estimate_memory."""
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
    """Returns the prefix cache's default bytes: a fraction of the memory beside the weights."""
    return max(0, limit - weights) // PREFIX_CACHE_SHARE


def dequantises_at_load(folder: ModelFolder, *, limit: int, float32: bool) -> bool:
    """Returns whether quantised weights are dequantised at load, instead of in every product.

    True on a CPU, whose BLAS has only dense products, if the dequantised weights take at most
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
    """Returns the dtype of most bytes of the floating-point weights; F32 without such weights."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_BYTES:
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _in_memory(tensor: Tensor, width: int) -> int:
    """Returns a tensor's bytes in memory.

    A floating-point number takes `width` bytes; packed numbers keep their size.
    """
    return math.prod(tensor.shape) * width if tensor.dtype in FLOAT_BYTES else tensor.nbytes
