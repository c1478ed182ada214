"""The shape of demo-chat, and the initial weights for its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

Array = npt.NDArray[np.float32]
Weights = dict[str, Array]

FILE, NORM = "model.safetensors", "model.norm.weight"
# Factor of the stored weights of the last norm. With the factor, temperature 1 samples as
# temperature 1 / SHARPER does without the factor.
SHARPER = 2.0
PREFIX = "model.layers.{}."
SHARPNESS = 40.0  # logit of a head's attention at the head's fixed distance
NEAR = 6  # the fastest-turning rotary pairs of a head, which tell neighbouring positions apart
MATCH = 1.7  # scale of queries and keys in heads that search for an earlier occurrence
COPY = 0.5  # scale of the outputs of these heads
QUIET = 0.1  # initial scale of the outputs of all other parts
CONSTANT = 0.5  # a number that the vectors of all tokens contain


@dataclass(frozen=True)
class Shape:
    """The sizes of the model. The first layers need `hidden` = 4 * `head`."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 512
    head: int = 64
    context: int = 1024
    rope_base: float = 10000.0
    epsilon: float = 1e-6


def initial(shape: Shape, seed: int) -> Weights:
    """Returns random weights; `copying_heads` makes four heads of the first two layers."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        drawn: Array = rng.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        return drawn.astype(np.float32)

    residual = QUIET * (2 * shape.layers) ** -0.5
    inner, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    weights: Weights = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden)}
    for number in range(shape.layers):
        layer = PREFIX.format(number)
        weights |= {
            f"{layer}self_attn.q_proj.weight": matrix(inner, shape.hidden),
            f"{layer}self_attn.k_proj.weight": matrix(kv, shape.hidden),
            f"{layer}self_attn.v_proj.weight": matrix(kv, shape.hidden),
            f"{layer}self_attn.o_proj.weight": matrix(shape.hidden, inner, residual),
            f"{layer}mlp.gate_proj.weight": matrix(shape.feed_forward, shape.hidden),
            f"{layer}mlp.up_proj.weight": matrix(shape.feed_forward, shape.hidden),
            f"{layer}mlp.down_proj.weight": matrix(shape.hidden, shape.feed_forward, residual),
            f"{layer}input_layernorm.weight": np.ones(shape.hidden, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(shape.hidden, np.float32),
        }
    weights[NORM] = np.ones(shape.hidden, np.float32)
    copying_heads(weights, shape, rng)
    return weights


def copying_heads(weights: Weights, shape: Shape, rng: np.random.Generator) -> None:
    """Initialises four heads that copy the token after an earlier occurrence of the last tokens.

    Otherwise a small model learns such heads only after millions of tokens. The hidden state is
    divided into four parts: the token, one constant, the token before it, and the token before
    that. In layer 0 two heads look back by one and by two tokens and fill the last two parts. In
    layer 1 two heads compare these parts with the current token and the token before it, and write
    the token that they find. Training may change all these weights.
    """
    head, half = shape.head, shape.head // 2
    own = shape.hidden - 2 * head - 1  # size of the token's own part
    # The offsets of the parts of the two earlier tokens.
    before, earlier = shape.hidden - 2 * head, shape.hidden - head
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, own:] = 0
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    embedding[:, own] = CONSTANT
    project = np.linalg.qr(rng.standard_normal((own, head)))[0].T.astype(np.float32)  # [head, own]

    first, second = PREFIX.format(0) + "self_attn.", PREFIX.format(1) + "self_attn."
    query, key = weights[f"{first}q_proj.weight"], weights[f"{first}k_proj.weight"]
    value, out = weights[f"{first}v_proj.weight"], weights[f"{first}o_proj.weight"]
    query[: 2 * head] = key[:head] = value[:head] = 0
    speed = shape.rope_base ** (-np.arange(NEAR) / half)
    # The norm scales the constant to this value before the projections.
    constant = CONSTANT * np.sqrt(shape.hidden / (1 + CONSTANT**2))
    scale = np.sqrt(SHARPNESS * np.sqrt(head) / NEAR) / constant
    key[:NEAR, own] = scale
    for number in range(2):
        turn, row = speed * (number + 1), number * head
        query[row : row + NEAR, own] = scale * np.cos(turn)
        query[row + half : row + half + NEAR, own] = -scale * np.sin(turn)
    value[:head, :own] = project / constant
    out[:, : 2 * head] = 0
    out[before:earlier, :head] = out[earlier:, head : 2 * head] = np.eye(head)

    query, key = weights[f"{second}q_proj.weight"], weights[f"{second}k_proj.weight"]
    value, out = weights[f"{second}v_proj.weight"], weights[f"{second}o_proj.weight"]
    query[: 2 * head] = key[:head] = value[:head] = 0
    key[:half, before : before + half] = MATCH * np.eye(half)
    key[half:head, earlier : earlier + half] = MATCH * np.eye(half)
    query[:half, :own] = query[head : head + half, :own] = MATCH * project[:half]
    query[head + half : 2 * head, before : before + half] = MATCH * np.eye(half)
    value[:head, :own] = project
    out[:, : 2 * head] = 0
    out[:own, :head] = out[:own, head : 2 * head] = COPY * project.T


def parameters(weights: Mapping[str, Any]) -> int:
    return sum(array.size for array in weights.values())


def save_weights(folder: Path, weights: Weights) -> None:
    """Writes the weights, rounded to float16."""
    stored = {**weights, NORM: weights[NORM] * SHARPER}
    half = {name: array.astype(np.float16) for name, array in stored.items()}
    save_file(half, folder / FILE, metadata={"format": "pt"})
    (folder / FILE).chmod(0o644)


def load(folder: Path) -> tuple[Tokenizer, Weights]:
    """Returns a folder's tokenizer and float32 weights; divides the last norm by SHARPER.

    `save_weights` has multiplied the last norm by SHARPER.
    """
    weights = {name: array.astype(np.float32) for name, array in load_file(folder / FILE).items()}
    weights[NORM] /= SHARPER
    return Tokenizer.from_file(str(folder / "tokenizer.json")), weights
