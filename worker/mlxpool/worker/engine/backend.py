"""Says once, in the worker's log, what it computes with."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys

import mlx.core as mx
import psutil

log = logging.getLogger("mlxpool.worker")


CHUNK, CPU_CHUNK = 2048, 512  # tokens
SHARE = 0.8  # of the device's memory, for a worker without a limit of its own
BIG = 2**20  # bytes from which on an array has pages of its own
_M_MMAP_THRESHOLD = -3  # mallopt's name for it
_FULL = ("out of memory", "unable to allocate")  # a device without room is not lost
_NUMBERS = 1024  # that are added up to see whether the device computes


def on_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def chunk() -> int:
    """Tokens of a prompt that are read at once; more are no faster, and longer than a moment."""
    return CHUNK if on_gpu() else CPU_CHUNK


def device_memory() -> tuple[int, int]:
    """Bytes the device has, and of these free now; the machine's, where they are one."""
    machine = psutil.virtual_memory()
    if not on_gpu():
        return int(machine.total), int(machine.available)
    info = mx.device_info()
    total = int(info.get("total_memory", 0) or info.get("memory_size", 0)) or int(machine.total)
    return total, int(info.get("free_memory", 0)) or int(machine.available)


def computes() -> bool:
    """Whether the device still gives right results; what was begun on it is waited for."""
    try:
        mx.clear_cache()
        found = mx.arange(_NUMBERS).sum().item()
    except Exception as error:
        if any(words in str(error).lower() for words in _FULL):
            return True
        log.exception("the device does not compute")
        return False
    return bool(found == _NUMBERS * (_NUMBERS - 1) // 2)


def limit_of(configured: int) -> int:
    """Bytes a worker may take; `configured` 0: SHARE of what the device has."""
    return configured or int(device_memory()[0] * SHARE)


def outside_mlx() -> int:
    """Bytes of this process that MLX does not count, where they share one memory: Python, BLAS."""
    if on_gpu() and sys.platform == "linux":
        return 0
    resident = int(psutil.Process().memory_info().rss)
    return max(0, resident - mx.get_active_memory() - mx.get_cache_memory())


def steady_heap() -> None:
    """Keeps large arrays out of the C heap, where that can be asked.

    Once one was freed, glibc puts others of its size into the heap, and there whatever comes to lie
    behind them keeps their pages after they are gone: 30 MB after a warm-up.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, BIG)


def trim() -> None:
    """Gives what the C heap holds of freed memory back to the system, where that can be asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def say() -> None:
    """One line; on a Linux CPU without OpenBLAS the line says how to get it."""
    if on_gpu():
        log.info("computing on the GPU", extra={"device": mx.device_info().get("device_name")})
    elif sys.platform != "linux" or "blas" in os.environ.get("LD_PRELOAD", ""):
        log.info("computing on the CPU in float32")
    else:
        log.warning(
            "computing on the CPU with the reference BLAS, some 30 times slower than OpenBLAS:"
            " install libopenblas0-pthread (Debian, Ubuntu) or set MLXPOOL_OPENBLAS to its file"
        )
