"""The architectures of GGUF files: their config.json, and our names for their tensors. No MLX.

llama.cpp stores most weights as the released checkpoints do. The table here undoes three
differences: rows of a llama's queries and keys are in the order of llama.cpp's RoPE, 1 is added to
norms of Gemma, and the factors of Llama 3's RoPE wavelengths are a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from msgspec import Struct, field

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.rope import parse_rope
from mlxpool.worker.weights.gguf.fields import Fields
from mlxpool.worker.weights.gguf.header import GgufHeader, StoredTensor
from mlxpool.worker.weights.safetensors_header import Header, Tensor

Config = dict[str, Any]
Tensors = Mapping[str, StoredTensor]

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NO_BLOCKS = "whole"  # name of the only part of a tensor that is not in blocks
ROPE_FREQS = "rope_freqs.weight"  # factors of llama 3's wavelengths
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Architecture(Struct, frozen=True):
    """The rules for reading GGUF files of one architecture.

    `config` makes the content of config.json. `names`: our name of a layer's module or tensor, by
    llama.cpp's name. `scales`: the dtype, on a GPU, of the scales and biases of quantised weights.
    `ignored`: prefixes of the names of unused tensors.
    """

    config: Callable[[Fields, Tensors], Config]
    names: Mapping[str, str]
    scales: str = "F16"
    norms_plus_one: bool = False
    # Name of a module with rotated rows -> key of config.json with the module's number of heads.
    rotated: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def name_of(self, stored: str) -> str | None:
        """Returns our name for a tensor; None if the tensor is unused.

        An unknown tensor keeps its name.
        """
        if stored == ROPE_FREQS or stored.startswith(self.ignored):
            return None
        if stored in _WHOLE:
            return _WHOLE[stored]
        match = _BLOCK.fullmatch(stored)
        if match is None:
            return stored
        layer, part = match[1], match[2]
        module, _, kind = part.rpartition(".")
        if part in self.names:
            return f"model.layers.{layer}.{self.names[part]}"
        if module in self.names and kind in ("weight", "bias"):
            return f"model.layers.{layer}.{self.names[module]}.{kind}"
        return stored

    def heads_of(self, name: str, config: Mapping[str, Any]) -> int:
        """Returns the number of heads in our tensor `name`, if RoPE rotates it, else 0."""
        module, _, kind = name.rpartition(".")
        key = self.rotated.get(module.rpartition(".")[2]) if kind in ("weight", "bias") else None
        return int(config[key]) if key else 0


def architecture_of(fields: Fields) -> Architecture:
    """Returns the file's architecture; raises ModelLoadFailed for an unknown one."""
    architecture = ARCHITECTURES.get(fields.architecture)
    if architecture is None:
        raise ModelLoadFailed(
            f"{fields.file} has the architecture {fields.architecture!r:.60}, which is not read"
            f" from GGUF; read are {', '.join(ARCHITECTURES)}"
        )
    return architecture


def _refuse(fields: Fields, what: str) -> NoReturn:
    raise ModelLoadFailed(f"{fields.file}: {what} of {fields.architecture!r} is not read")


def _common(fields: Fields, tensors: Tensors, model_type: str) -> Config:
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadFailed(f"{fields.file} has no tensor 'token_embd.weight'")
    heads = fields.integer("attention.head_count")
    config: Config = {
        "model_type": model_type,
        "hidden_size": fields.integer("embedding_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    scaling = _rope_scaling(fields)
    return {**config, "rope_scaling": scaling} if scaling else config


def _rope_scaling(fields: Fields) -> Config | None:
    kind = fields.find("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        _refuse(fields, f"the rope scaling {kind!r}")
    scaling: Config = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        trained = fields.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = trained
        scaling["beta_fast"] = fields.number("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    return scaling


def llama3_scaling(fields: Fields, factors: Sequence[float], config: Config) -> Config:
    """Returns Llama 3's RoPE scaling for these factors of wavelengths, one for each RoPE pair.

    llama.cpp stores only the factors, as a tensor. All other parameters of the scaling have been
    the same in all releases. Raises ModelLoadFailed if these parameters give other factors.
    """
    scaling: Config = {
        "rope_type": "llama3",
        "factor": max(factors, default=1.0),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    size = config["head_dim"]
    settings = {"rope_theta": config["rope_theta"], "rope_scaling": scaling}
    scaled, plain = (
        parse_rope(settings, size).freqs,
        parse_rope({**settings, "rope_scaling": {}}, size),
    )
    periods = [plain.base ** (index / size) for index in range(0, size, 2)]
    pairs = zip(scaled or (), periods, factors, strict=False)
    alike = all(
        math.isclose(wavelength / period, by, rel_tol=1e-3) for wavelength, period, by in pairs
    )
    if len(factors) != size // 2 or not alike:
        _refuse(fields, f"the tensor {ROPE_FREQS!r} with other factors than those of llama 3")
    return scaling


def _with_heads(fields: Fields, config: Config) -> Config:
    """Returns the config with the head size added.

    Raises ModelLoadFailed if RoPE rotates only a part of a head.
    """
    size = fields.integer(
        "attention.key_length", config["hidden_size"] // config["num_attention_heads"]
    )
    rotated = fields.integer("rope.dimension_count", size)
    if rotated != size:
        _refuse(fields, f"a rotation of {rotated} of a head's {size} numbers")
    if fields.integer("attention.value_length", size) != size:
        _refuse(fields, "a head with values of another size than its keys")
    return {**config, "head_dim": size}


def _with_feed(fields: Fields, config: Config) -> Config:
    return {**config, "intermediate_size": fields.integer("feed_forward_length")}


def _llama(fields: Fields, tensors: Tensors) -> Config:
    if fields.integer("expert_count", 0):
        _refuse(fields, "a mixture of experts")
    config = _with_feed(fields, _with_heads(fields, _common(fields, tensors, "llama")))
    biases = {part: f"blk.0.{part}.bias" in tensors for part in ("attn_q", "ffn_gate")}
    return {**config, "attention_bias": biases["attn_q"], "mlp_bias": biases["ffn_gate"]}


def _qwen2(fields: Fields, tensors: Tensors) -> Config:
    return _with_feed(fields, _with_heads(fields, _common(fields, tensors, "qwen2")))


def _qwen3(fields: Fields, tensors: Tensors) -> Config:
    return _with_feed(fields, _with_heads(fields, _common(fields, tensors, "qwen3")))


def _qwen3_moe(fields: Fields, tensors: Tensors) -> Config:
    config = _with_heads(fields, _common(fields, tensors, "qwen3_moe"))
    width = fields.integer("expert_feed_forward_length")
    return {
        **config,
        "intermediate_size": fields.integer("feed_forward_length", width),
        "moe_intermediate_size": width,
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "norm_topk_prob": True,
    }


def _gemma3(fields: Fields, tensors: Tensors) -> Config:
    config = _with_feed(fields, _with_heads(fields, _common(fields, tensors, "gemma3_text")))
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    # The 27B model (62 layers) scales scores by hidden_size / heads, but no key has this number.
    scaled = config["hidden_size"] // heads if layers == _LAYERS_OF_27B else config["head_dim"]
    softcap = fields.find("final_logit_softcapping")
    return {
        **config,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled,
        "sliding_window": fields.integer("attention.sliding_window"),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": softcap or None,
    }


_LAYERS_OF_27B = 62


def _deepseek2(fields: Fields, tensors: Tensors) -> Config:
    """Returns the config.json of GLM-4.7-Flash: latent attention, experts chosen by sigmoids."""
    if fields.find("rope.scaling.type") not in (None, "none"):
        _refuse(fields, "a context that is stretched")
    if fields.integer("expert_gating_func", _SOFTMAX) != _SIGMOID:
        _refuse(fields, "experts that are chosen by a softmax")
    config = _with_feed(fields, _common(fields, tensors, "glm4_moe_lite"))
    rotated = fields.integer("rope.dimension_count")
    groups = fields.integer("expert_group_count", 1)
    return {
        **config,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": fields.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": fields.integer("attention.key_length_mla") - rotated,
        "v_head_dim": fields.integer("attention.value_length_mla"),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "n_routed_experts": fields.integer("expert_count"),
        "n_shared_experts": fields.integer("expert_shared_count", 0),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": fields.integer("expert_group_used_count", groups),
    }


_SOFTMAX, _SIGMOID = 1, 2


def _gpt_oss(fields: Fields, tensors: Tensors) -> Config:
    config = _with_heads(fields, _common(fields, tensors, "gpt_oss"))
    return {
        **config,
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "sliding_window": fields.integer("attention.sliding_window"),
    }


# general.architecture -> its rules. Scales of Gemma and gpt-oss are BF16, because numbers of these
# models leave the range of float16.
ARCHITECTURES = {
    "llama": Architecture(
        _llama,
        _ATTENTION | _DENSE,
        rotated={"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"},
    ),
    "qwen2": Architecture(_qwen2, _ATTENTION | _DENSE),
    "qwen3": Architecture(_qwen3, _ATTENTION | _HEAD_NORMS | _DENSE),
    "qwen3moe": Architecture(_qwen3_moe, _ATTENTION | _HEAD_NORMS | _DENSE | _EXPERTS),
    "gemma3": Architecture(
        _gemma3,
        _ATTENTION | _HEAD_NORMS | _DENSE | _GEMMA3,
        scales="BF16",
        norms_plus_one=True,
        ignored=("v.", "mm."),  # tensors of the image encoder, in Ollama's files
    ),
    "deepseek2": Architecture(_deepseek2, _ATTENTION | _DENSE | _EXPERTS | _LATENT),
    "gpt-oss": Architecture(_gpt_oss, _ATTENTION | _GPT_OSS, scales="BF16"),
}


def as_checkpoint(header: GgufHeader, architecture: Architecture) -> Header:
    """Returns a GGUF header as the header of a checkpoint, without unused tensors.

    A quantised weight is listed as the tensors of its layout: `weight`, `scales` and `biases`. The
    `stored` name of a tensor is llama.cpp's name, a colon, and the name of the part.
    """
    tensors: dict[str, Tensor] = {}
    for stored in header.tensors.values():
        name = architecture.name_of(stored.name)
        if name is None:
            continue
        module = name.removesuffix(".weight")
        for part, dtype, shape in _parts(stored, architecture.scales):
            full = name if part == NO_BLOCKS else f"{module}.{part}"
            tensors[full] = Tensor(full, dtype, shape, header.file, f"{stored.name}:{part}")
    return Header(header.raw, tensors, {})


def _parts(stored: StoredTensor, scales: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Returns the parts of a tensor, with the dtype and the shape of each part."""
    layout = stored.kind.layout
    if layout is None:
        yield NO_BLOCKS, stored.kind.dtype, stored.shape
        return
    floats = scales if layout.mode == "affine" else "U8"
    for part, shape in layout.tensors(stored.shape):
        yield part, "U32" if part == "weight" else floats, shape
