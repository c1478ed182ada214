"""Small models with a head that predicts further tokens (MTP), of each family with such heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxpool.common.options import Options
from mlxpool.worker import models
from mlxpool.worker.scheduling.sequence import Sequence
from support.numpy_heads import feed_head, glm_head, qwen_head
from support.worker_checkpoints import (
    GLM,
    QWEN3_5,
    QWEN3_NEXT,
    config,
    random_weights,
    write_checkpoint,
)

TOKENS = 60  # the most tokens that a sequence may generate
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
# Families whose head has a layer without memory of earlier tokens.
WITHOUT_CACHE: dict[str, dict[str, Any]] = {"llama": {"mtp_intermediate_size": 24}}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {**GLM, "num_nextn_predict_layers": 1},
    "qwen3_next": {**QWEN3_NEXT, **EXPERTS, "head_dim": 8},
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": {**QWEN3_5, **EXPERTS, "model_type": "qwen3_5_moe_text"},
}
EVERY = {**FAMILIES, **WITHOUT_CACHE}
REFERENCES: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    **{name: glm_head if name.startswith("glm") else qwen_head for name in FAMILIES},
    **dict.fromkeys(WITHOUT_CACHE, feed_head),
}
OWN = ("embed_tokens.weight", "shared_head.head.weight")  # tensors that GLM's head may have


def settings(family: str, **changes: Any) -> dict[str, Any]:
    """Returns the config.json of a family."""
    return config(**{**EVERY[family], **changes})


def weights_with_head(
    family: str, seed: int = 0, *, own: bool = False, **changes: Any
) -> dict[str, np.ndarray]:
    """Returns random weights of a model and its head. `own`: the head also has the tensors OWN."""
    whole = settings(family, **changes)
    prediction = models.plan(whole).prediction
    assert prediction is not None
    stored = {"mtp.layers.0.mlp.gate.weight"} if whole.get("num_experts") else set()
    drafted = whole.get("mtp_draft_vocab_size")
    if own:
        stored |= {f"model.layers.{whole['num_hidden_layers']}.{name}" for name in OWN}
    weights = random_weights(whole, seed, prediction.whole(stored))
    if drafted:
        tokens = np.random.default_rng(seed).permutation(whole["vocab_size"])[:drafted]
        weights["mtp.draft_tokens"] = tokens.astype(np.float32)
    return weights


def likely_right(weights: Mapping[str, np.ndarray], share: float = 0.002) -> dict[str, np.ndarray]:
    """Returns the weights, changed so that most drafts of the MTP head are right, at any depth.

    Layers are scaled by `share`, so the next token depends almost only on the newest token. The
    head reads only its input token, and predicts the most likely token after it.
    """
    joint = next(name for name in weights if name.endswith(("eh_proj.weight", "mtp.fc.weight")))
    head = joint.removesuffix("eh_proj.weight").removesuffix("fc.weight")
    changed = dict(weights)
    for name, array in weights.items():
        ahead = name.startswith(head)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            changed[name] = array * np.float32(0 if ahead else share)
        elif ahead and "norm" in name:
            changed[name] = np.ones_like(array)
    size = len(weights[joint])
    changed[joint] = np.eye(size, 2 * size, dtype=np.float32)  # only the half for the input token
    changed["model.norm.weight"] = np.ones_like(weights["model.norm.weight"])
    return changed


def write_predicting(
    path: Path, family: str, seed: int = 0, *, right: bool = False, **changes: Any
) -> Path:
    """Writes a model with a head; `right`: most of its drafts are right, see likely_right."""
    weights = weights_with_head(family, seed, **changes)
    stored = likely_right(weights) if right else weights
    return write_checkpoint(path, weights=stored, **{**EVERY[family], **changes})


def sequence(number: int, size: int = 70) -> Sequence:
    """Returns a greedy sequence with a random prompt of `size` tokens; `number` is the seed."""
    prompt = tuple(np.random.default_rng(number).integers(0, 256, size).tolist())
    options = Options.parse({"temperature": 0.0, "ignore_eos": True})
    return Sequence(bytes([number] * 16), 1, prompt, options, number, TOKENS)
