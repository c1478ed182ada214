"""The input of a model's head: the hidden states of the tokens that get logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlxpool.worker.layers.layer_types import PendingNorm


@contextmanager
def noted_head(model: Any) -> Iterator[list[Any]]:
    """Yields a list to which each call of the head appends its input [E, d]."""
    head, taken = model.head, []

    def noted(x: Any) -> Any:
        taken.append(x() if isinstance(x, PendingNorm) else x)
        return head(x)

    model.head = noted
    try:
        yield taken
    finally:
        model.head = head
