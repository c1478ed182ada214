"""Says once, in the worker's log, what it computes with."""

from __future__ import annotations

import logging
import os
import sys

import mlx.core as mx

log = logging.getLogger("mlxpool.worker")


def say() -> None:
    """One line; on a Linux CPU without OpenBLAS the line says how to get it."""
    if mx.default_device().type == mx.DeviceType.gpu:
        log.info("computing on the GPU", extra={"device": mx.device_info().get("device_name")})
    elif sys.platform != "linux" or "blas" in os.environ.get("LD_PRELOAD", ""):
        log.info("computing on the CPU in float32")
    else:
        log.warning(
            "computing on the CPU with the reference BLAS, some 30 times slower than OpenBLAS:"
            " install libopenblas0-pthread (Debian, Ubuntu) or set MLXPOOL_OPENBLAS to its file"
        )
