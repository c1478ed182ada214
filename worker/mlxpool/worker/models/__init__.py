"""The supported architectures, one file each, and a table of them by model_type.

A file describes an architecture without MLX and may extend a related one; shared code is in
layers/.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.model_plan import ModelPlan

ARCHITECTURES = {
    "gemma3": "mlxpool.worker.models.gemma3",
    "gemma3_text": "mlxpool.worker.models.gemma3",
    "glm4_moe_lite": "mlxpool.worker.models.glm4_moe_lite",
    "gpt_oss": "mlxpool.worker.models.gpt_oss",
    "llama": "mlxpool.worker.models.llama",
    "mistral": "mlxpool.worker.models.llama",
    "mllama": "mlxpool.worker.models.mllama",
    "qwen2": "mlxpool.worker.models.qwen2",
    "qwen3": "mlxpool.worker.models.qwen3",
    "qwen3_5": "mlxpool.worker.models.qwen3_5",
    "qwen3_5_moe": "mlxpool.worker.models.qwen3_5",
    "qwen3_5_moe_text": "mlxpool.worker.models.qwen3_5",
    "qwen3_5_text": "mlxpool.worker.models.qwen3_5",
    "qwen3_moe": "mlxpool.worker.models.qwen3_moe",
    "qwen3_next": "mlxpool.worker.models.qwen3_next",
    "qwen3_vl": "mlxpool.worker.models.qwen3_vl",
}

SUPPORTED = tuple(ARCHITECTURES)


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the plan of the model that config.json describes; imports no MLX.

    Raises ModelLoadFailed for an unknown model_type, a missing key or an unusable value.
    """
    model_type = config.get("model_type")
    module = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if module is None:
        raise ModelLoadFailed(
            f"config.json has model_type {model_type!r}, which is not supported; "
            f"supported are: {', '.join(SUPPORTED)}, and with `pip install 'mlxpool[zoo]'` "
            "the models of mlx-lm"
        )
    return cast(ModelPlan, import_module(module).plan(config))
