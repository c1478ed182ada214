"""The log-softmax over a whole prompt in plain NumPy: one forward pass in float64, no cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mlxpool.worker.compute.model_source
from support.float64 import attention, normed, rope_angles, rotated, silu

DEMO = Path(mlxpool.worker.compute.model_source.__file__).parents[1] / "demo"
Numbers = npt.NDArray[np.float64]


def demo_logprobs(ids: Sequence[int]) -> Numbers:
    """Returns log-probabilities [T - 1, vocabulary] of the tokens of a prompt.

    Row i has the log-probabilities of token i + 1, given tokens 0 to i.
    """
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    weights = _weights(DEMO / "model.safetensors")
    x = weights["model.embed_tokens.weight"][np.array(ids)]
    eps = config["rms_norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        part = f"model.layers.{layer}."
        inner = normed(x, weights[part + "input_layernorm.weight"], eps)
        x = x + _attended(inner, weights, part + "self_attn.", config)
        inner = normed(x, weights[part + "post_attention_layernorm.weight"], eps)
        gate = inner @ weights[part + "mlp.gate_proj.weight"].T
        up = inner @ weights[part + "mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ weights[part + "mlp.down_proj.weight"].T
    logits = normed(x, weights["model.norm.weight"], eps) @ weights["model.embed_tokens.weight"].T
    near = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(near - np.log(np.exp(near).sum(axis=-1, keepdims=True)))[:-1]


def _attended(x: Numbers, weights: dict[str, Numbers], part: str, config: Any) -> Numbers:
    heads, pairs, size = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    count = len(x)
    q = (x @ weights[part + "q_proj.weight"].T).reshape(count, heads, size)
    k = (x @ weights[part + "k_proj.weight"].T).reshape(count, pairs, size)
    v = (x @ weights[part + "v_proj.weight"].T).reshape(count, pairs, size)
    angles = rope_angles(count, size, config["rope_theta"])
    q, k = (rotated(projected, angles, traditional=False) for projected in (q, k))
    out = attention(q, k, v, np.tri(count, dtype=bool), size**-0.5).reshape(count, -1)
    return np.asarray(out @ weights[part + "o_proj.weight"].T)


def _weights(file: Path) -> dict[str, Numbers]:
    """Returns the tensors of a safetensors file of bfloat16 numbers."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, tensor in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        assert tensor["dtype"] == "BF16", tensor["dtype"]
        begin, end = (8 + size + at for at in tensor["data_offsets"])
        halves = np.frombuffer(data[begin:end], dtype="<u2").astype(np.uint32)
        numbers = (halves << 16).view(np.float32).astype(np.float64)
        tensors[name] = numbers.reshape(tensor["shape"])
    return tensors
