"""A GPU whose kernels return zeros, for tests of the kernels that a model's load compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest

from mlxpool.worker.attention import layout_choice
from mlxpool.worker.kernels import device
from support import simt


@contextmanager
def built_kernels(*, right: bool = True) -> Iterator[list[str]]:
    """Replaces CUDA kernels by kernels that return zeros, and makes MLX report a CUDA GPU.

    If `right` is true, every trial run of a kernel succeeds in spite of the zeros. Yields the names
    of the called kernels, one name for each call. Forward passes are compiled by MLX.
    """
    called: list[str] = []

    def made(name: str, **_: Any) -> Callable[..., list[Any]]:
        def call(
            *,
            output_shapes: Sequence[tuple[int, ...]],
            output_dtypes: Sequence[Any],
            **_: Any,
        ) -> list[Any]:
            called.append(name.removeprefix("mlxpool_"))
            outputs = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype=dtype) for shape, dtype in outputs]

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", made)
        patch.setattr(mx.cuda, "is_available", lambda: True)
        patch.setattr(device, "on_gpu", lambda: True)
        patch.setattr(layout_choice, "writes_in_place", lambda shape, on_gpu: True)
        for name, module in list(sys.modules.items()):
            if right and name.startswith("mlxpool.worker") and hasattr(module, "kernel_works"):
                patch.setattr(module, "kernel_works", lambda what, trial: True)
        simt.forget_kernels()
        try:
            yield called
        finally:
            simt.forget_kernels()
