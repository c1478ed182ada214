"""Computes encoder architectures in plain NumPy and float64, as the reference for the engine.

Each text is computed alone. Tensors have the names of released checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from support import float64
from support.float64 import normed, silu

Array = npt.NDArray[np.float64]
Tensors = Mapping[str, Array]
_erf = np.vectorize(math.erf)


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def linear(w: Tensors, name: str, x: Array) -> Array:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", np.zeros(1))


def layer_norm(w: Tensors, name: str, x: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(
        normed(centred, w[f"{name}.weight"], eps) + w.get(f"{name}.bias", np.zeros(1))
    )


def rotated(x: Array, base: float) -> Array:
    """Returns x [L, H, D] after rotary embedding, which pairs the halves of each head."""
    angles = float64.rope_angles(len(x), x.shape[-1], base)
    return np.asarray(float64.rotated(x, angles, traditional=False))


def attention(q: Array, k: Array, v: Array, window: int = 0, *, causal: bool = False) -> Array:
    """Returns attention [L, H * D] of q [L, H, D], k and v [L, KV, D], with scale 1 / sqrt(D).

    A token attends only to tokens that are less than `window` tokens away. With `window` 0 it
    attends to all tokens.
    """
    length = len(q)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) if causal else np.ones_like(distance, bool)
    if window:
        seen = seen & (abs(distance) < window)
    return np.asarray(float64.attention(q, k, v, seen, q.shape[-1] ** -0.5).reshape(length, -1))


def heads(x: Array, count: int) -> Array:
    return x.reshape(len(x), count, -1)


def bert(config: Mapping[str, Any], w: Tensors, ids: list[int], types: list[int]) -> Array:
    eps, count = 1e-12, config["num_attention_heads"]
    first = config["pad_token_id"] + 1 if "roberta" in config["model_type"] else 0
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][first : first + len(ids)]
    x = x + w["embeddings.token_type_embeddings.weight"][types]
    x = layer_norm(w, "embeddings.LayerNorm", x, eps)
    for index in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{index}"
        q, k, v = (
            heads(linear(w, f"{name}.attention.self.{kind}", x), count)
            for kind in ("query", "key", "value")
        )
        read = linear(w, f"{name}.attention.output.dense", attention(q, k, v))
        x = layer_norm(w, f"{name}.attention.output.LayerNorm", x + read, eps)
        wide = gelu(linear(w, f"{name}.intermediate.dense", x))
        wide = linear(w, f"{name}.output.dense", wide)
        x = layer_norm(w, f"{name}.output.LayerNorm", x + wide, eps)
    return x


def nomic_bert(config: Mapping[str, Any], w: Tensors, ids: list[int], types: list[int]) -> Array:
    eps, count = 1e-12, config["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][ids]
    x = layer_norm(w, "emb_ln", x + w["embeddings.token_type_embeddings.weight"][types], eps)
    for index in range(config["num_hidden_layers"]):
        name = f"encoder.layers.{index}"
        q, k, v = np.split(linear(w, f"{name}.attn.Wqkv", x), 3, axis=-1)
        q, k = (rotated(heads(projection, count), 1000.0) for projection in (q, k))
        read = linear(w, f"{name}.attn.out_proj", attention(q, k, heads(v, count)))
        x = layer_norm(w, f"{name}.norm1", x + read, eps)
        wide = linear(w, f"{name}.mlp.fc11", x) * silu(linear(w, f"{name}.mlp.fc12", x))
        x = layer_norm(w, f"{name}.norm2", x + linear(w, f"{name}.mlp.fc2", wide), eps)
    return x


def modernbert(config: Mapping[str, Any], w: Tensors, ids: list[int], types: list[int]) -> Array:
    eps, count = 1e-5, config["num_attention_heads"]
    x = layer_norm(w, "embeddings.norm", w["embeddings.tok_embeddings.weight"][ids], eps)
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        base, window = (1e4, config["local_attention"] // 2 + 1) if index % 3 else (1.6e5, 0)
        inner = layer_norm(w, f"{name}.attn_norm", x, eps) if index else x
        q, k, v = np.split(linear(w, f"{name}.attn.Wqkv", inner), 3, axis=-1)
        q, k = (rotated(heads(projection, count), base) for projection in (q, k))
        x = x + linear(w, f"{name}.attn.Wo", attention(q, k, heads(v, count), window))
        up, gate = np.split(
            linear(w, f"{name}.mlp.Wi", layer_norm(w, f"{name}.mlp_norm", x, eps)), 2, axis=-1
        )
        x = x + linear(w, f"{name}.mlp.Wo", gelu(up) * gate)
    return layer_norm(w, "final_norm", x, eps)


def qwen3(config: Mapping[str, Any], w: Tensors, ids: list[int], types: list[int]) -> Array:
    eps, base = 1e-6, 10000.0
    x = w["embed_tokens.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}"
        inner = normed(x, w[f"{name}.input_layernorm.weight"], eps)
        q, k, v = (
            heads(linear(w, f"{name}.self_attn.{letter}_proj", inner), config[count])
            for letter, count in zip("qkv", HEAD_COUNTS, strict=True)
        )
        q = rotated(normed(q, w[f"{name}.self_attn.q_norm.weight"], eps), base)
        k = rotated(normed(k, w[f"{name}.self_attn.k_norm.weight"], eps), base)
        x = x + linear(w, f"{name}.self_attn.o_proj", attention(q, k, v, causal=True))
        inner = normed(x, w[f"{name}.post_attention_layernorm.weight"], eps)
        gate, up = (linear(w, f"{name}.mlp.{kind}_proj", inner) for kind in ("gate", "up"))
        x = x + linear(w, f"{name}.mlp.down_proj", silu(gate) * up)
    return np.asarray(normed(x, w["norm.weight"], eps))


HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")
STATES: Mapping[str, Callable[..., Array]] = {
    "bert": bert,
    "modernbert": modernbert,
    "nomic_bert": nomic_bert,
    "qwen3": qwen3,
    "roberta": bert,
    "xlm-roberta": bert,
}
POOLS: Mapping[str, Callable[[Array], Array]] = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / math.sqrt(len(x)),
    "weightedmean": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


def head(config: Mapping[str, Any], w: Tensors, states: Array) -> Array:
    """Returns the classification logits of a text from its hidden states [L, hidden]."""
    if config["model_type"] == "bert":
        return linear(w, "classifier", np.tanh(linear(w, "pooler.dense", states[0])))
    if config["model_type"] == "modernbert":
        pool = POOLS[config.get("classifier_pooling", "cls")]
        hidden = layer_norm(w, "head.norm", gelu(linear(w, "head.dense", pool(states))), 1e-5)
        return linear(w, "classifier", hidden)
    if config["model_type"] == "qwen3":
        return linear(w, "score", states[-1])
    hidden = np.tanh(linear(w, "classifier.dense", states[0]))
    return linear(w, "classifier.out_proj", hidden)
