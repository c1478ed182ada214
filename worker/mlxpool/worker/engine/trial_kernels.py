"""Compiles the kernels that a load tries, in parallel, before the first trial.

A trial compiles its kernels in the thread that loads, and waits for them. So the model's layers
first name the kernels that they would try, and these kernels are compiled in parallel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any

import mlx.core as mx

from mlxpool.worker.attention.in_pool.ragged_batch import AttentionProbe
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.kernels import block_write, kernel_cache, row_columns, sampling
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.transfers import downloads

# Layers list their kernels for passes of these numbers of tokens: kernels for few and for many
# tokens differ.
ASKED_LINES = (1, 64)
OUR_MODULES = "mlxpool.worker."


def compile_trials(
    model: Model, shape: RowShape, vocabulary: int, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Compiles the kernels of this model's trials that are not on the disk. Computes no pass.

    `shape`: the arrays that the model's rows store.
    """
    with forgotten_caches(), kernel_cache.rehearsing() as jobs:
        downloads.works()
        block_write.makes_tables()
        row_columns.works()
        sampling.supports(vocabulary, shape.dtype)
        if shape.fits_blocks:  # models with other layers have few kernels, or none
            for lines in ASKED_LINES:
                probe = AttentionProbe(shape.dtype, quantised=shape.quantised)
                model(mx.zeros((lines,), dtype=mx.int32), probe)
    kernel_cache.compile_together(jobs, on_progress)


@contextmanager
def forgotten_caches() -> Iterator[None]:
    """A context for rehearsed trials, whose results are meaningless.

    At its end, it clears the function caches to which these trials have added results.
    """
    sizes = {function: function.cache_info().currsize for function in _cached_functions()}
    try:
        yield
    finally:
        for function in _cached_functions():
            if function.cache_info().currsize != sizes.get(function, 0):
                function.cache_clear()


def _cached_functions() -> Iterator[_lru_cache_wrapper[Any]]:
    for name, module in list(sys.modules.items()):
        if name.startswith(OUR_MODULES):
            yield from (
                function
                for function in vars(module).values()
                if isinstance(function, _lru_cache_wrapper)
            )
