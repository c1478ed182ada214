"""The invariants of the spans of images in a prompt."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.worker.media.spans import MediaSpan


def check_spans(spans: Iterable[MediaSpan], inputs: int) -> None:
    """Raises ValueError if a span is empty, out of order, overlaps another, or exceeds `inputs`."""
    last = 0
    for number, span in enumerate(spans):
        if span.count < 1 or span.start < last or span.end > inputs:
            raise ValueError(
                f"media span {number} is [{span.start}, {span.end}): it must have inputs, begin at"
                f" {last} or later and end at {inputs} or before"
            )
        last = span.end
