"""Compares the next tokens of an 8-bit KV cache with those of an unquantised KV cache.

The unquantised cache has the dtype of the model. The text is divided into sections, and each
section begins with empty caches. The next token is always taken from the text, not from the model
(teacher forcing). With the unquantised cache, the model reads a section in chunks. With the 8-bit
cache, it reads the first half in chunks, as a prompt, and the second half token by token, as an
answer.
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

CHUNK = 256  # tokens of a chunk


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of an 8-bit and an unquantised cache over a text.

    `share` is the fraction of `positions` at which both caches give the same most likely token.
    `divergence` is the mean Kullback-Leibler divergence, in nats. `capacity` is a ratio for equal
    memory: the tokens that fit into an 8-bit cache, divided by those that fit into an unquantised
    cache.
    """

    positions: int
    share: float
    divergence: float
    capacity: float


def compare(loaded: LoadedModel, ids: Sequence[int], window: int) -> Agreement:
    """Returns how far an 8-bit and an unquantised cache agree over a text.

    `window` is the number of tokens of each section of the text.
    """
    exact_layout, exact_shape = _layout(loaded, AUTO, window)
    layout, shape = _layout(loaded, INT8, window)
    agreeing, divergence = 0, 0.0
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        half = len(part) // 2
        exact = _log_probabilities(exact_layout, part, _chunks(len(part)))
        eight_bits = _log_probabilities(layout, part, _chunks(half) + [1] * (len(part) - half))
        agreeing += int((exact.argmax(-1) == eight_bits.argmax(-1)).sum())
        divergence += float((np.exp(exact) * (exact - eight_bits)).sum())
    capacity = exact_shape.token_bytes / shape.token_bytes
    return Agreement(len(ids), agreeing / len(ids), divergence / len(ids), capacity)


def _layout(loaded: LoadedModel, kv: str, context: int) -> tuple[Layout, RowShape]:
    """Returns a KV cache layout as a worker chooses it, for one row."""
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
    """Returns log-probabilities [n, vocabulary] after each token.

    The tokens are read in passes of `counts` tokens.
    """
    row, start, parts = layout.store.new_row(), 0, []
    for count in counts:
        inputs = mx.array(list(ids[start : start + count]), dtype=mx.int32)
        logits = layout.forward([RowSpan(row, count, lines=count)], inputs, [0]).logits
        logits = logits.astype(mx.float32)
        parts.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        start += count
    layout.store.release(row)
    return np.concatenate(parts)
