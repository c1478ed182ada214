"""Heads that predict further tokens (MTP), in NumPy and float64: references for the worker's heads.

Each function computes a whole sequence and stores nothing between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from support.float64 import attention, normed, rope_angles, rotated, silu, softmax

Array: TypeAlias = Any  # an array of NumPy
Weights = Mapping[str, Array]
Layer = Callable[[Array, "Tensors", Mapping[str, Any]], Array]  # x [T, d] -> [T, d]


class Tensors:
    """The tensors whose names begin with a prefix, in float64."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self.weights, self.prefix = weights, prefix

    def __call__(self, name: str) -> Array:
        return self.weights[f"{self.prefix}.{name}"].astype(np.float64)

    def has(self, name: str) -> bool:
        return f"{self.prefix}.{name}" in self.weights

    def below(self, name: str) -> Tensors:
        return Tensors(self.weights, f"{self.prefix}.{name}")


def glm_head(
    weights: Weights, config: Mapping[str, Any], tokens: list[int], states: Array
) -> tuple[Array, Array]:
    """Returns states [T, d] after the head's norm, and logits [T, vocabulary].

    The inputs are the tokens, and the model's states [T, d] at the tokens before them.
    """
    own = Tensors(weights, f"model.layers.{config['num_hidden_layers']}")
    embed = own if own.has("embed_tokens.weight") else Tensors(weights, "model")
    eps = config["rms_norm_eps"]
    e = normed(embed("embed_tokens.weight")[tokens], own("enorm.weight"), eps)
    h = normed(states, own("hnorm.weight"), eps)
    x = np.concatenate([e, h], axis=1) @ own("eh_proj.weight").T
    out = normed(glm_layer(x, own, config), own("shared_head.norm.weight"), eps)
    name = "shared_head.head.weight"
    return out, out @ (own(name) if own.has(name) else weights["lm_head.weight"]).T


def feed_head(
    weights: Weights, config: Mapping[str, Any], tokens: list[int], states: Array
) -> tuple[Array, Array]:
    """Returns states [T, d] and logits [T, vocabulary] of a head with a feed-forward layer.

    The arguments are those of glm_head. The logits are computed with the model's output head.
    """
    return _mtp_head(weights, config, tokens, states, _feed_layer)


def qwen_head(
    weights: Weights, config: Mapping[str, Any], tokens: list[int], states: Array
) -> tuple[Array, Array]:
    """Returns states [T, d] and logits [T, vocabulary] of Qwen's head.

    The arguments are those of glm_head.
    """
    return _mtp_head(weights, config, tokens, states, qwen_layer)


def _mtp_head(
    weights: Weights, config: Mapping[str, Any], tokens: list[int], states: Array, layer: Layer
) -> tuple[Array, Array]:
    own, eps = Tensors(weights, "mtp"), config["rms_norm_eps"]
    embed = weights["model.embed_tokens.weight"].astype(np.float64)
    e = normed(embed[tokens], own("pre_fc_norm_embedding.weight"), eps)
    h = normed(states, own("pre_fc_norm_hidden.weight"), eps)
    x = np.concatenate([e, h], axis=1) @ own("fc.weight").T
    out = normed(layer(x, own.below("layers.0"), config), own("norm.weight"), eps)
    head = embed if config.get("tie_word_embeddings") else weights["lm_head.weight"]
    if own.has("draft_tokens"):
        head = head[own("draft_tokens").astype(int)]
    return out, out @ head.T


def glm_layer(x: Array, layer: Tensors, config: Mapping[str, Any]) -> Array:
    """Returns a layer's output: latent attention, experts chosen by sigmoids, residual sums."""
    eps = config["rms_norm_eps"]
    x = x + _latent_attention(
        normed(x, layer("input_layernorm.weight"), eps), layer.below("self_attn"), config
    )
    y = normed(x, layer("post_attention_layernorm.weight"), eps)
    mlp = layer.below("mlp")
    scores = 1 / (1 + np.exp(-(y @ mlp("gate.weight").T)))
    count = config["num_experts_per_tok"]
    chosen = np.argsort(-(scores + mlp("gate.e_score_correction_bias")), axis=1)[:, :count]
    shares = np.take_along_axis(scores, chosen, 1)
    shares = shares / shares.sum(1, keepdims=True) * config["routed_scaling_factor"]
    return x + _experts(y, mlp, chosen, shares) + _swiglu(y, mlp.below("shared_experts"))


def qwen_layer(x: Array, layer: Tensors, config: Mapping[str, Any]) -> Array:
    """Returns the layer's output: gated attention, then a feed-forward layer, dense or of experts.

    Besides the experts there is a gated shared expert.
    """
    eps = config["rms_norm_eps"]
    x = x + _gated_attention(
        normed(x, layer("input_layernorm.weight"), eps), layer.below("self_attn"), config
    )
    y = normed(x, layer("post_attention_layernorm.weight"), eps)
    mlp = layer.below("mlp")
    if not mlp.has("gate.weight"):
        return x + _swiglu(y, mlp)
    logits = y @ mlp("gate.weight").T
    scores = softmax(logits)
    chosen = np.argsort(-scores, axis=1)[:, : config["num_experts_per_tok"]]
    shares = np.take_along_axis(scores, chosen, 1)
    if config.get("norm_topk_prob", True):
        shares = shares / shares.sum(1, keepdims=True)
    gate = 1 / (1 + np.exp(-(y @ mlp("shared_expert_gate.weight").T)))
    return x + _experts(y, mlp, chosen, shares) + gate * _swiglu(y, mlp.below("shared_expert"))


def _feed_layer(x: Array, layer: Tensors, config: Mapping[str, Any]) -> Array:
    norm = layer("post_attention_layernorm.weight")
    return x + _swiglu(normed(x, norm, config["rms_norm_eps"]), layer.below("mlp"))


def _latent_attention(x: Array, attn: Tensors, config: Mapping[str, Any]) -> Array:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, eps = config["qk_nope_head_dim"], config["rms_norm_eps"]
    q = normed(x @ attn("q_a_proj.weight").T, attn("q_a_layernorm.weight"), eps)
    q = (q @ attn("q_b_proj.weight").T).reshape(len(x), heads, -1)
    both = x @ attn("kv_a_proj_with_mqa.weight").T
    latent = normed(both[:, :rank], attn("kv_a_layernorm.weight"), eps)
    keys = np.einsum("tr,hrp->thp", latent, attn("embed_q.weight"))
    values = np.einsum("tr,hvr->thv", latent, attn("unembed_out.weight"))
    base = config["rope_theta"]
    turned = _rope(both[:, None, rank:], base, pairs=True)
    k = np.concatenate([keys, np.repeat(turned, heads, axis=1)], axis=2)
    q = np.concatenate([q[..., :plain], _rope(q[..., plain:], base, pairs=True)], axis=2)
    out = _attend(q, k, values)
    return out.reshape(len(x), -1) @ attn("o_proj.weight").T


def _gated_attention(x: Array, attn: Tensors, config: Mapping[str, Any]) -> Array:
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config.get("rope_parameters") or config
    q_gate = (x @ attn("q_proj.weight").T).reshape(len(x), heads, -1)
    q, gate = np.split(q_gate, 2, axis=2)
    k = (x @ attn("k_proj.weight").T).reshape(len(x), pairs, -1)
    v = (x @ attn("v_proj.weight").T).reshape(len(x), pairs, -1)
    eps, size = config["rms_norm_eps"], q.shape[2]
    turned = int(size * rope["partial_rotary_factor"])
    q, k = (
        np.concatenate(
            [_rope(projected[..., :turned], rope["rope_theta"]), projected[..., turned:]], axis=2
        )
        for projected in (
            normed(q, attn("q_norm.weight"), eps),
            normed(k, attn("k_norm.weight"), eps),
        )
    )
    out = _attend(q, k, v) / (1 + np.exp(-gate))
    return out.reshape(len(x), -1) @ attn("o_proj.weight").T


def _attend(q: Array, k: Array, v: Array) -> Array:
    """Returns causal attention [T, H, V] of queries and keys [T, H, D]."""
    return attention(q, k, v, np.tri(len(q), dtype=bool), q.shape[2] ** -0.5)


def _rope(x: Array, base: float, *, pairs: bool = False) -> Array:
    """Returns x [T, H, D] rotated by positions (RoPE).

    With `pairs`, two neighbouring numbers are rotated as a pair. Otherwise a pair has the numbers
    at the same index of both halves of D.
    """
    return rotated(x, rope_angles(len(x), x.shape[2], base), traditional=pairs)


def _experts(x: Array, mlp: Tensors, chosen: Array, shares: Array) -> Array:
    gate, up, down = (mlp(f"switch_mlp.{kind}_proj.weight") for kind in ("gate", "up", "down"))
    out = np.zeros_like(x)
    for token, experts in enumerate(chosen):
        for expert, share in zip(experts, shares[token], strict=True):
            inner = silu(gate[expert] @ x[token]) * (up[expert] @ x[token])
            out[token] += share * (down[expert] @ inner)
    return out


def _swiglu(x: Array, mlp: Tensors) -> Array:
    gate, up = x @ mlp("gate_proj.weight").T, x @ mlp("up_proj.weight").T
    return (silu(gate) * up) @ mlp("down_proj.weight").T
