"""What a model takes in memory, reckoned from its files. Pure; a running worker measures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlxpool.worker.layers.derived_weights import MODULE_TENSORS, TensorSpec
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.safetensors_header import Tensor

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes
MAX_DEQUANTISED_SHARE = (
    0.25  # of its limit a worker may take for quantised weights turned into numbers
)
PACKED_BYTES = {"U32": 4, "U8": 1}
PREFIX_CACHE_SHARE = 4  # by default the prefix cache gets one part in so many of the free memory
DTYPE_NAMES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, but for `context` (tokens) and `sequences`.

    A step needs some more for a while, and the process itself: a worker measures both at load.
    """

    context: int
    sequences: int
    weights: int
    token: int  # keys and values of one token, in all layers
    fixed: int  # of a sequence whatever its length: windows, states
    sequence: int  # of one sequence with its context full
    all_sequences: int
    prefix_cache: int  # at most; it takes what is free and gives it back

    @property
    def least(self) -> int:
        """With one sequence of full length and an empty prefix cache."""
        return self.weights + self.sequence

    def context_within(self, limit: int) -> int:
        """Tokens that one sequence may have beside the weights, its context at most."""
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
) -> MemoryEstimate:
    """`limit` is what a worker may take; `float32`: it computes with 4 bytes, as on a CPU.

    `chunk` are the tokens of a prompt that are read at once.
    """
    width = 4 if float32 else FLOAT_BYTES[main_dtype(folder.tensors.values())]
    weights = _weight_bytes(folder, width)
    if deterministic or dequantises_at_load(folder, limit=limit, float32=float32):
        weights += dequantised_growth(folder, width)
    token = sum(cache.token_bytes(width) for cache in folder.plan.caches)
    fixed = sum(cache.fixed_bytes(width, chunk) for cache in folder.plan.caches)
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


def default_prefix_cache_bytes(limit: int, weights: int) -> int:
    """Bytes of the prefix cache where no setting says so: a share of what weights leave."""
    return max(0, limit - weights) // PREFIX_CACHE_SHARE


def dequantises_at_load(folder: ModelFolder, *, limit: int, float32: bool) -> bool:
    """Whether quantised weights become numbers once, at load, instead of in every product.

    On a CPU, whose BLAS knows plain numbers only, where these leave room for the rest.
    """
    if not float32 or not folder.match.layouts:
        return False
    width = FLOAT_BYTES["F32"]
    return (
        _weight_bytes(folder, width) + dequantised_growth(folder, width)
        <= MAX_DEQUANTISED_SHARE * limit
    )


def dequantised_growth(folder: ModelFolder, width: int) -> int:
    """Bytes more once quantised weights are numbers of `width` bytes."""
    return sum(_grown(folder, module, width) for module in folder.match.layouts)


def _weight_bytes(folder: ModelFolder, width: int) -> int:
    return sum(_in_memory(tensor, width) for tensor in folder.tensors.values())


def _grown(folder: ModelFolder, module: str, width: int) -> int:
    specs = folder.match.weights
    names = (f"{module}.{kind}" for kind in MODULE_TENSORS if kind != "bias")
    packed = sum(_spec_bytes(specs[name], width) for name in names if name in specs)
    return math.prod(folder.plan.shapes[f"{module}.weight"]) * width - packed


def _spec_bytes(spec: TensorSpec, width: int) -> int:
    return math.prod(spec.shape) * (
        width if spec.dtype in FLOAT_BYTES else PACKED_BYTES[spec.dtype]
    )


def main_dtype(tensors: Iterable[Tensor]) -> str:
    """What most bytes of the floating-point weights are; F32 where there are none."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_BYTES:
            sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "F32"


def _in_memory(tensor: Tensor, width: int) -> int:
    """Floating-point numbers become `width` bytes; packed ones stay as they are."""
    return math.prod(tensor.shape) * width if tensor.dtype in FLOAT_BYTES else tensor.nbytes
