"""Runs a model's image encoder: one image at a time, outside of any pass."""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.packed_batch import PackedBatch
from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.layers.model_plan import SeeingModel
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.weights.load import LoadedModel

MEASURED_PIXELS = 2**20  # most pixels of the measured image, for models that do not resize


class ImageEncoder:
    """Encodes an image to unevaluated features, see SeeingModel.encode_image."""

    def __init__(self, loaded: LoadedModel) -> None:
        vision = loaded.folder.vision
        assert vision is not None
        self._settings, self._windows = vision.settings, [0] * vision.plan.layers
        self._tokens = vision.plan.encoder_tokens
        self._model = cast(SeeingModel, loaded.model)
        self._dtype = loaded.dtype

    def __call__(self, image: PreparedImage) -> mx.array:
        settings = self._settings
        tokens, padding = self._tokens(image.grid)
        whole = tokens + padding
        batch = PackedBatch([whole], [0] * whole, self._windows, padding=padding)
        pixels = mx.array(image.pixels).astype(mx.float32) * settings.scale
        normed = (pixels - mx.array(settings.mean)) / mx.array(settings.std)
        return self._model.encode_image(normed.astype(self._dtype), image.grid, batch)

    def measure(self) -> tuple[int, int]:
        """Encodes an image, so that the encoder is compiled.

        Returns the peak bytes of the encoding, and the bytes of the largest image's features.
        """
        side = max(math.isqrt(min(self._settings.max_pixels, MEASURED_PIXELS)), 1)
        size = self._settings.canvas_of(side, side)
        grid = self._settings.grid_of(*size)
        count = self._settings.count_of(grid)
        image = PreparedImage(b"", np.zeros((*size, 3), np.uint8), grid, count)
        if on_gpu():  # the first encoding also takes the memory of compiling
            mx.eval(self(image))
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        features = self(image)
        mx.eval(features)
        settings = self._settings
        parts = settings.tiles or max(1, -(-settings.max_pixels // (size[0] * size[1])))
        return int(mx.get_peak_memory()) - before, features.nbytes * parts
