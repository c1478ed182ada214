"""Adds images to the spans of a pass: features of inputs, the images that inputs see, positions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.attention.row_spans import ImageLines, ImageView, RowSpan
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.spans import image_views, overlapping, positions
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.inspect import Vision


def add_images(row: RowSpan, span: Span, vision: Vision, encoded: EncodedImages[Any]) -> None:
    """Adds to a row's span the features, views and positions of its sequence's images."""
    if vision.plan.crossed:
        row.views = _views(span, encoded)
    else:
        row.images = _images(span, encoded)
    row.positions = _positions(span, vision)


def _images(span: Span, encoded: EncodedImages[mx.array]) -> tuple[ImageLines, ...]:
    """Returns the images that have inputs in a span, with their features."""
    images = []
    for image in overlapping(span.sequence.media, span.start, span.end):
        begin, end = max(image.start, span.start), min(image.end, span.end)
        features = encoded.get(image.image)[:, begin - image.start : end - image.start]
        images.append(ImageLines(begin - span.start, end - span.start, features, image.group))
    return tuple(images)


def _views(span: Span, encoded: EncodedImages[mx.array]) -> tuple[ImageView, ...]:
    """Returns the images that the inputs of a span see in layers of cross-attention."""
    return tuple(
        ImageView(
            begin - span.start, end - span.start, tuple(encoded.get(image.image) for image in seen)
        )
        for begin, end, seen in image_views(span.sequence.media, span.start, span.end)
    )


def _positions(span: Span, vision: Vision) -> npt.NDArray[np.int32] | None:
    """Returns the positions of a span's inputs; None: they are the inputs' indices in the row."""
    media = span.sequence.media
    if not vision.plan.grid_positions or media[0].start >= span.end:
        return None
    return positions(span.start, span.end, media, vision.settings.merge)
