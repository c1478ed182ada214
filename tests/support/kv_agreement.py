"""Compares the next tokens of text over 8-bit keys and values with those over the model's numbers.

The text is teacher-forced: every token follows what the text has before it, in windows. Each window
is read in chunks with the model's numbers, as a resumed stream is, and with 8 bits half in chunks
and half token by token, as a prompt and its answer are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import choose_layout, make_layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.caches.stored import AUTO, INT8
from mlxpool.worker.kernels import device
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.weights.load import LoadedModel

CHUNK = 256  # tokens that are read at a time


@dataclass(frozen=True, slots=True)
class Agreement:
    """The share of `positions` whose likeliest token is that of the model's numbers.

    `divergence`: the mean of the Kullback-Leibler divergences, in nats. `capacity`: how many times
    as many tokens the same bytes hold.
    """

    positions: int
    share: float
    divergence: float
    capacity: float


def compare(loaded: LoadedModel, ids: Sequence[int], window: int) -> Agreement:
    """The agreement of both over a text."""
    exact_layout, exact_shape = _layout(loaded, AUTO, window)
    layout, shape = _layout(loaded, INT8, window)
    agreeing, divergence = 0, 0.0
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        half = len(part) // 2
        exact = _log_probabilities(exact_layout, part, _chunks(len(part)))
        found = _log_probabilities(layout, part, _chunks(half) + [1] * (len(part) - half))
        agreeing += int((exact.argmax(-1) == found.argmax(-1)).sum())
        divergence += float((np.exp(exact) * (exact - found)).sum())
    capacity = exact_shape.token_bytes / shape.token_bytes
    return Agreement(len(ids), agreeing / len(ids), divergence / len(ids), capacity)


def _layout(loaded: LoadedModel, kv: str, context: int) -> tuple[Layout, RowShape]:
    """The layout in which a worker has rows, for one row."""
    on_gpu, plan = device.on_gpu(), loaded.folder.plan
    shape = RowShape(plan.caches, loaded.dtype, context, CHUNK, kv=kv)
    name, shape = choose_layout(None, shape, loaded.model, deterministic=False, on_gpu=on_gpu)
    blocks = blocks_for(context) + 1
    layout = make_layout(
        name, shape, loaded.model, blocks, rows=1, deterministic=False, on_gpu=on_gpu
    )
    return layout, shape


def _chunks(tokens: int) -> list[int]:
    return [min(CHUNK, tokens - start) for start in range(0, tokens, CHUNK)]


def _log_probabilities(layout: Layout, ids: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """[n, vocabulary] behind each token of a new row, read in passes of so many tokens."""
    row, start, found = layout.store.new_row(), 0, []
    for count in counts:
        inputs = mx.array(list(ids[start : start + count]), dtype=mx.int32)
        logits = layout.forward([RowSpan(row, count, lines=count)], inputs, [0]).logits
        logits = logits.astype(mx.float32)
        found.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        start += count
    layout.store.release(row)
    return np.concatenate(found)
