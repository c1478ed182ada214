"""Small random models in the layout of a Hugging Face folder, for tests of the worker."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from mlxpool.cli.commands.check import lines
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.protocol import frames
from mlxpool.worker import models
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.locate import find_files
from support import kinds

BASE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Every second layer is recurrent.
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50000.0,
        "partial_rotary_factor": 0.5,
    },
}
GLM: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
BOS, EOS = 256, 257
SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def config(**changes: Any) -> dict[str, Any]:
    """Returns the config.json BASE with these changes; None removes a key."""
    removed = {key for key in BASE if key in changes and changes[key] is None}
    return {key: value for key, value in {**BASE, **changes}.items() if key not in removed}


def random_weights(
    settings: Mapping[str, Any], seed: int = 0, plan: ModelPlan | None = None
) -> dict[str, np.ndarray]:
    """Returns random float32 weights for a plan's names and shapes (default: the config's)."""
    draw = np.random.default_rng(seed)
    weights = {}
    for name, shape in (plan or models.plan(settings)).shapes.items():
        scale = 1.0 if "norm" in name or "embed" in name else 2 * shape[-1] ** -0.5
        noise = draw.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        weights[name] = 1 + noise / 10 if "norm" in name else noise
    return weights


def write_checkpoint(
    path: Path,
    *,
    shards: int = 1,
    seed: int = 0,
    weights: Mapping[str, np.ndarray] | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Writes a model folder; `changes` are keys of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    settings = config(**changes)
    write_json(path / "config.json", settings)
    write_json(path / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    write_tokenizer(path, tokenizer_config)
    write_weights(path, dict(weights or random_weights(settings, seed)), shards)
    return path


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(path: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Writes a byte-level tokenizer: ids 0 to 255 are bytes, then special tokens follow."""
    alphabet = _byte_chars()
    tokenizer = Tokenizer(BPE({char: byte for byte, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    default = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": CHAT_TEMPLATE}
    write_json(path / "tokenizer_config.json", {**default, **(settings or {})})


def _byte_chars() -> list[str]:
    """Returns the byte-level pre-tokenizer's character for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    chars, shifted = [], 256
    for byte in range(256):
        chars.append(chr(byte) if byte in printable else chr(shifted))
        shifted += byte not in printable
    return chars


def write_weights(path: Path, weights: dict[str, np.ndarray], shards: int = 1) -> None:
    """Writes model.safetensors, or several shards and their index."""
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights)
        return
    weight_map = {}
    for number, names in enumerate(np.array_split(list(weights), shards), start=1):
        file = f"model-{number:05}-of-{shards:05}.safetensors"
        write_safetensors(path / file, {str(name): weights[str(name)] for name in names})
        weight_map.update({str(name): file for name in names})
    write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})


def write_safetensors(file: Path, weights: Mapping[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, file)


def write_raw_safetensors(file: Path, header: bytes, data: bytes = b"") -> None:
    """Writes any header, for tests of files that must be refused."""
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


def refusal(model: Path | str) -> str:
    """Returns the error for a refused model, given by its path or name."""
    with pytest.raises(ModelLoadFailed) as caught:
        inspect(find_files(str(model)))
    return str(caught.value)


def refusal_of_worker(folder: Path) -> str:
    """Returns a worker's error for a folder.

    Asserts that `check` reports this error, and that a message can contain the error.
    """
    from mlxpool.worker.compute.model_source import open_source  # this import needs MLX
    from mlxpool.worker.diagnose.check import check

    with pytest.raises(ModelLoadFailed) as caught:
        open_source(ModelConfig(path=str(folder)))
    words = str(caught.value.body()["message"])
    report = check("m", ModelConfig(path=str(folder)))
    assert words in report["problems"]
    frames.encode(frames.Header(kinds.ERROR), {"error": words})
    "\n".join(lines(report)).encode()
    return words
