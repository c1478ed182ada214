"""The forward pass of demo-chat in NumPy: fast enough for tests, and without an ML framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from demo_chat.weights import PREFIX, Shape, Weights

Numbers = npt.NDArray[Any]


def expected(weights: Weights, shape: Shape, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """Returns for each token the most likely next token."""
    embedding = weights["model.embed_tokens.weight"]
    count, half = len(ids), shape.head // 2
    turns = np.arange(count)[:, None] * shape.rope_base ** (-np.arange(half) / half)
    cos, sin = np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)
    later = np.triu(np.full((count, count), -np.inf, np.float32), 1)

    def product(x: Numbers, name: str) -> Numbers:
        return x @ weights[f"{name}.weight"].T

    def norm(x: Numbers, name: str) -> Numbers:
        square: Numbers = np.square(x).mean(-1, keepdims=True)
        return x * weights[f"{name}.weight"] / np.sqrt(square + shape.epsilon)

    def heads(x: Numbers) -> Numbers:
        return x.reshape(count, -1, shape.head).swapaxes(0, 1)

    def rotated(x: Numbers) -> Numbers:
        left, right = x[..., :half], x[..., half:]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def attention(x: Numbers, layer: str) -> Numbers:
        groups = shape.heads // shape.kv_heads
        query = rotated(heads(product(x, f"{layer}q_proj")))
        key = rotated(heads(product(x, f"{layer}k_proj"))).repeat(groups, 0)
        value = heads(product(x, f"{layer}v_proj")).repeat(groups, 0)
        scores = query @ key.swapaxes(1, 2) * shape.head**-0.5 + later
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        return product(mixed.swapaxes(0, 1).reshape(count, -1), f"{layer}o_proj")

    x: Numbers = embedding[list(ids)]
    for number in range(shape.layers):
        layer = PREFIX.format(number)
        x = x + attention(norm(x, f"{layer}input_layernorm"), f"{layer}self_attn.")
        h = norm(x, f"{layer}post_attention_layernorm")
        gate = product(h, f"{layer}mlp.gate_proj")
        gate = gate / (1 + np.exp(-gate)) * product(h, f"{layer}mlp.up_proj")
        x = x + product(gate, f"{layer}mlp.down_proj")
    likeliest: npt.NDArray[np.int64] = (norm(x, "model.norm") @ embedding.T).argmax(-1)
    return likeliest
