"""Small GGUF files, written by llama.cpp's Python package, with the weights of test checkpoints.

llama.cpp's names and layouts are repeated here on purpose, independent of the worker's code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, TokenType
from gguf.quants import quantize

from support.worker_checkpoints import BOS, CHAT_TEMPLATE, EOS, SPECIAL

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_CHARS = {  # characters of byte-level vocabularies
    **{byte: chr(byte) for byte in _PRINTABLE},
    **{byte: chr(256 + index) for index, byte in enumerate(_OTHERS)},
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.switch_mlp.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.embed_q": "attn_k_b",
    "self_attn.unembed_out": "attn_v_b",
}
OTHER_NORMS = {  # architecture -> names that differ from the names above
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
}


def llama_cpp_name(name: str, architecture: str = "llama") -> str:
    """Returns llama.cpp's name of a tensor."""
    names = {**NAMES, **OTHER_NORMS.get(architecture, {})}
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    layer, rest = (f"blk.{match[1]}.", match[2]) if match else ("", name)
    if rest in names:
        return layer + names[rest]
    module, _, kind = rest.rpartition(".")
    return f"{layer}{names[module]}.{kind}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Returns query or key weights in llama.cpp's order: rows of a rotated pair are adjacent."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored_weight(
    name: str, weight: np.ndarray, architecture: str, config: Mapping[str, Any]
) -> np.ndarray:
    """Returns a tensor's numbers as llama.cpp's conversion stores them."""
    if architecture == "llama" and ".q_proj." in name:
        return interleaved(weight, config["num_attention_heads"])
    if architecture == "llama" and ".k_proj." in name:
        return interleaved(weight, config["num_key_value_heads"])
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight + np.float32(1)
    return weight


def byte_level_vocabulary(writer: GGUFWriter, pre: str = "gpt-2") -> None:
    """Writes the vocabulary of support.worker_checkpoints: a token for each byte, and SPECIAL."""
    tokens = [BYTE_CHARS[byte] for byte in range(256)] + list(SPECIAL)
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])  # `th` is not a token; the writer omits an empty list
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def numbers_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns an architecture's metadata that follow from common keys of config.json."""
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
    }
    if "head_dim" in config:
        numbers["attention.key_length"] = config["head_dim"]
        numbers["attention.value_length"] = config["head_dim"]
    return {f"{architecture}.{key}": value for key, value in numbers.items()}


def write_gguf(
    path: Path,
    weights: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    architecture: str = "llama",
    kind: Callable[[str, np.ndarray], Kind] = lambda name, weight: Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: Callable[[GGUFWriter], None] = byte_level_vocabulary,
    extra: Mapping[str, np.ndarray] | None = None,
    split: int = 0,
) -> Path:
    """Writes a model; `kind` returns the type of a tensor.

    `metadata` are additional values, `extra` additional F32 tensors by llama.cpp's names, `split`
    is the most tensors per file.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in {**numbers_of(config, architecture), **(metadata or {})}.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    vocabulary(writer)
    for name, weight in weights.items():
        stored = stored_weight(name, weight, architecture, config)
        add_tensor(writer, llama_cpp_name(name, architecture), stored, kind(name, stored))
    for name, weight in (extra or {}).items():
        add_tensor(writer, name, weight, Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, kind: Kind) -> None:
    """Adds a tensor, quantised to `kind`."""
    writer.add_tensor(name, quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
