"""The kind of device that MLX computes on."""

from __future__ import annotations

import mlx.core as mx


def on_gpu() -> bool:
    """Whether MLX's default device is a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)
