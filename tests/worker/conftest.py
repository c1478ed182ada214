"""Fixtures for all tests of the worker: memory limits, simulated kernels, freed engines."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator

import pytest

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # options of mallopt(3)
MAX_INT = 2**31 - 1
MAX_PREFIX_BYTES = 2**25  # bytes; the default of engines: a pool allocates them at once


@pytest.fixture(scope="session", autouse=True)
def freed_memory_is_kept() -> None:
    """Makes the C library keep freed memory for later arrays of this process.

    By default the C library returns a large array's memory to the kernel. The kernel then clears
    each page for the next array, which takes longer than the computation of a small model.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # not every C library has it
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, MAX_INT)


@pytest.fixture(scope="session")
def on_cuda() -> bool:
    try:
        import mlx.core as mx
    except ImportError:
        return False
    return bool(mx.cuda.is_available())


@pytest.fixture(scope="session", autouse=True)
def small_on_a_gpu(on_cuda: bool) -> Iterator[None]:
    """Bounds the memory of engines on a GPU, where many tests share one card."""
    with pytest.MonkeyPatch.context() as patch:
        if on_cuda:
            processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            patch.setattr(
                "mlxpool.worker.kernels.device.DEFAULT_MEMORY_SHARE", min(0.02, 0.14 / processes)
            )
        yield


@pytest.fixture(scope="session", autouse=True)
def small_prefix_caches() -> Iterator[None]:
    """Bounds the prefix caches of engines, which by default grow with the machine's memory."""
    try:
        import mlxpool.worker.engine.memory  # noqa: F401  # this import needs MLX
        from mlxpool.worker.scheduling.memory_estimate import default_prefix_cache_bytes as default
    except ImportError:
        yield
        return

    def bounded(limit: int, weights: int) -> int:
        return min(default(limit, weights), MAX_PREFIX_BYTES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxpool.worker.engine.memory.default_prefix_cache_bytes", bounded)
        yield


@pytest.fixture(autouse=True)
def no_engine_outlives_its_test(on_cuda: bool) -> Iterator[None]:
    """Frees the memory of a test's engines on a GPU, which other tests need."""
    yield
    if on_cuda:
        import mlx.core as mx

        gc.collect()
        mx.clear_cache()


@pytest.fixture(scope="module")
def simulated_kernels(on_cuda: bool) -> Iterator[set[str]]:
    """Runs CUDA kernels for a module's tests, on the GPU or simulated if there is no GPU.

    Yields the names of the kernels that were simulated.
    """
    if on_cuda:
        yield set()
        return
    from support import simt  # this import needs MLX

    with simt.simulated() as called:
        yield called


@pytest.fixture
def machine(on_cuda: bool) -> Iterator[None]:
    """Runs CUDA kernels for a single test, as `simulated_kernels` does for a module."""
    if on_cuda:
        yield
        return
    from support import simt

    with simt.simulated():
        yield


@pytest.fixture
def token_grid_machine() -> Iterator[None]:
    """Runs kernels for one token in a test, on a GPU or on a simulated GPU."""
    from support import simt

    with simt.token_grid_machine():
        yield
