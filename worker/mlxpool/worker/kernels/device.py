"""The device that MLX computes on: its memory, its health and the C heap of the process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import sys
from collections.abc import Sequence

import mlx.core as mx
import psutil

from mlxpool.common.process.blas import MENDED_BY

log = logging.getLogger("mlxpool.worker")

GPU_CHUNK, CPU_CHUNK = 2048, 512  # tokens of a prefill chunk
SLOW_CHUNK = 64  # prefill chunk with the reference BLAS: a chunk of 512 may exceed prefill_limit
DEFAULT_MEMORY_SHARE = 0.8  # a worker's default limit, as a share of the device's memory
MMAP_THRESHOLD = 2**20  # bytes; an array of this size or more has its own pages
_M_MMAP_THRESHOLD = -3  # parameter number of mallopt
_MULTIPROCESSOR_COUNT, _MPS_ENABLED = 16, 133  # arguments of cuDeviceGetAttribute
# Texts of errors that leave the device usable.
_OUT_OF_MEMORY_TEXTS = ("out of memory", "unable to allocate")
_PROBE_SIZE = 1024  # numbers that are summed to check the device


def on_gpu() -> bool:
    """Returns whether MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def on_cuda() -> bool:
    """Returns whether MLX computes on an NVIDIA GPU; our kernels need one."""
    return on_gpu() and bool(mx.cuda.is_available())


def multiprocessors() -> int:
    """Returns the number of multiprocessors of the CUDA GPU; 0 if unknown."""
    return _attribute(_MULTIPROCESSOR_COUNT)


def shares_multiprocessors() -> bool:
    """Returns whether kernels of other processes may run at the same time (NVIDIA's MPS)."""
    return bool(_attribute(_MPS_ENABLED))


@functools.cache
def _attribute(number: int) -> int:
    """Returns attribute `number` of the CUDA GPU; 0 if unknown."""
    value = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute
        if ask(ctypes.byref(value), number, 0):
            return 0
    return value.value


def prefill_chunk(configured: int = 0) -> int:
    """Returns the number of tokens of a prefill chunk.

    It is `configured` or, if that is 0, the device's default. Chunks above the default are not
    faster and delay other requests longer.
    """
    return configured or (GPU_CHUNK if on_gpu() else CPU_CHUNK)


def device_memory() -> tuple[int, int]:
    """Returns the total and free bytes of the device's memory.

    If MLX computes on a CPU, this is the machine's memory.
    """
    machine = psutil.virtual_memory()
    if not on_gpu():
        return int(machine.total), int(machine.available)
    info = mx.device_info()
    total = int(info.get("total_memory", 0) or info.get("memory_size", 0)) or int(machine.total)
    return total, int(info.get("free_memory", 0)) or int(machine.available)


def device_computes() -> bool:
    """Returns whether the device still computes correctly; waits for its pending work."""
    try:
        mx.clear_cache()
        total = mx.arange(_PROBE_SIZE).sum().item()
    except Exception as error:
        if any(words in str(error).lower() for words in _OUT_OF_MEMORY_TEXTS):
            return True
        log.exception("the device does not compute")
        return False
    return bool(total == _PROBE_SIZE * (_PROBE_SIZE - 1) // 2)


def memory_limit(configured: int) -> int:
    """Returns the memory limit of a worker in bytes.

    It is `configured` or, if that is 0, DEFAULT_MEMORY_SHARE of the device's memory.
    """
    return configured or int(device_memory()[0] * DEFAULT_MEMORY_SHARE)


def has_own_memory() -> bool:
    """Returns whether the device has its own memory, separate from the memory of processes."""
    return on_gpu() and sys.platform == "linux"


def evaluate_in_own_memory(arrays: Sequence[mx.array]) -> None:
    """Evaluates arrays, each of more than 8 bytes, into the device's own memory.

    Otherwise MLX may take managed memory from its cache. In managed memory, a thread block needs
    microseconds to increment a counter or to wait for one, see docs/notes/mlx-cuda-buffers.md.
    """
    mx.clear_cache()
    mx.eval(*arrays)


def non_mlx_bytes() -> int:
    """Returns this process's bytes outside MLX (Python, BLAS); 0 if a GPU has its own memory."""
    if has_own_memory():
        return 0
    resident = int(psutil.Process().memory_info().rss)
    return max(0, resident - mx.get_active_memory() - mx.get_cache_memory())


def keep_large_arrays_off_heap() -> None:
    """Makes glibc allocate large arrays outside its heap; does nothing on other C libraries.

    After the first free of a large array, glibc raises its threshold and allocates arrays of this
    size in the heap. There, freed arrays keep their pages while a later allocation lies above them:
    30 MB after a warm-up.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def trim_heap() -> None:
    """Returns freed memory of the C heap to the system; does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def blas_of(platform: str, preload: str) -> str | None:
    """Returns the BLAS that MLX uses on a CPU; None: the slow reference BLAS.

    On Linux it is the BLAS file in `preload`, the value of $LD_PRELOAD.
    """
    if platform != "linux":
        return "Accelerate"
    return next((path for path in re.split("[: ]", preload) if "blas" in path), None)


def worker_chunk(configured: int, sequences: int) -> int:
    """Returns the number of tokens of a worker's prefill chunk; 0 means the device's default.

    It is `configured`, if that is not 0. Otherwise it is a small number with the slow reference
    BLAS, and 0 in all other cases. The small number is larger than `sequences`, because a step has
    a token of each sequence.
    """
    slow = not on_gpu() and blas_of(sys.platform, os.environ.get("LD_PRELOAD", "")) is None
    return configured or (max(SLOW_CHUNK, 2 * sequences) if slow else 0)


def log_device() -> None:
    """Logs the device, and a CPU's BLAS (or, on Linux, how to install OpenBLAS)."""
    if on_gpu():
        log.info("computing on the GPU", extra={"device": mx.device_info().get("device_name")})
        return
    blas = blas_of(sys.platform, os.environ.get("LD_PRELOAD", ""))
    if blas is not None:
        log.info("computing on the CPU in float32", extra={"blas": blas})
    else:
        log.warning(
            f"computing on the CPU with the reference BLAS, some 30 times slower than OpenBLAS:"
            f" {MENDED_BY}"
        )
