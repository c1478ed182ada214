"""A checked model folder -> a model in memory. `inspect` needs no MLX, `load` imports it.

`load` has to run in the thread that will use the model: MLX's streams belong to threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.folder import ModelFolder, inspect
from mlxpool.worker.models.base import Model

if TYPE_CHECKING:
    import mlx.core as mx

__all__ = ["Loaded", "ModelFolder", "inspect", "load"]

Progress = Callable[[int, int], None]  # tensors done, bytes done (as stored)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model whose weights are in memory, all of one dtype."""

    folder: ModelFolder
    model: Model
    dtype: mx.Dtype
    weight_bytes: int  # in memory
    deterministic: bool = False  # its results do not depend on what is computed beside them


def load(
    folder: ModelFolder,
    on_progress: Progress = lambda tensors, size: None,
    *,
    deterministic: bool = False,
) -> Loaded:
    """Reads the weights layer by layer, `on_progress` after each.

    Raises ModelLoadFailed when the files changed since `inspect` or cannot be read.
    """
    from mlxpool.worker.models.parts import Parts

    dtype = _dtype(folder)
    weights = _evaluated(folder, _read(folder), dtype, on_progress)
    weight_bytes = sum(array.nbytes for array in weights.values())  # build takes them out
    return Loaded(
        folder=folder,
        model=folder.plan.build(Parts(weights, exact=deterministic)),
        dtype=dtype,
        weight_bytes=weight_bytes,
        deterministic=deterministic,
    )


def _dtype(folder: ModelFolder) -> mx.Dtype:
    """float32 on the CPU, where halves are slower; else what most of the weights are."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return mx.float32
    sizes: Counter[str] = Counter()
    for tensor in folder.tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    known = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
    return known[sizes.most_common(1)[0][0]]


def _read(folder: ModelFolder) -> dict[str, mx.array]:
    """Every tensor, not yet read: MLX does that when it is evaluated."""
    import mlx.core as mx

    arrays: dict[str, mx.array] = {}
    for shard in folder.shards:
        try:
            found = mx.load(str(shard), format="safetensors")
        except (RuntimeError, OSError) as error:
            raise ModelLoadFailed(f"{shard} cannot be read: {error}") from error
        assert isinstance(found, dict)
        arrays.update(found)
    _compare(folder, arrays)
    return {name: arrays[name] for name in folder.tensors}


def _compare(folder: ModelFolder, arrays: Mapping[str, mx.array]) -> None:
    for name, tensor in folder.tensors.items():
        shape = arrays[name].shape if name in arrays else None
        if shape != tensor.shape:
            raise ModelLoadFailed(
                f"{tensor.file} changed while it was read: tensor {name!r} has shape {shape}, "
                f"had {tensor.shape}; load again"
            )


def _evaluated(
    folder: ModelFolder, arrays: dict[str, mx.array], dtype: mx.Dtype, on_progress: Progress
) -> dict[str, mx.array]:
    """The weights in `dtype`; empties `arrays`, so that stored and cast ones do not pile up."""
    import mlx.core as mx

    weights: dict[str, mx.array] = {}
    size = 0
    for names in _layers(folder):
        layer = {name: arrays.pop(name).astype(dtype) for name in names}
        try:
            mx.eval(list(layer.values()))
        except (RuntimeError, OSError) as error:
            raise ModelLoadFailed(f"{folder.path}: {names[0]!r} or near: {error}") from error
        weights.update(layer)
        size += sum(folder.tensors[name].nbytes for name in names)
        on_progress(len(weights), size)
    return weights


def _layers(folder: ModelFolder) -> Iterator[list[str]]:
    """The names in the order of use, those of one layer together."""
    for _, names in groupby(folder.tensors, key=_layer_of):
        yield list(names)


def _layer_of(name: str) -> str:
    _, layers, rest = name.partition(".layers.")
    return rest.partition(".")[0] if layers else name
