"""The supported encoder models, and the map from a config's model_type to its file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.encoder_plan import EncoderPlan

ENCODERS = {  # models that are only encoders
    "bert": "mlxpool.worker.models.bert",
    "modernbert": "mlxpool.worker.models.modernbert",
    "nomic_bert": "mlxpool.worker.models.nomic_bert",
    "roberta": "mlxpool.worker.models.bert",
    "xlm-roberta": "mlxpool.worker.models.bert",
}
DECODERS = {  # models that also generate text
    "gemma3_text": "mlxpool.worker.models.text_decoders",
    "qwen3": "mlxpool.worker.models.text_decoders",
}
SUPPORTED = (*ENCODERS, *DECODERS)


def encoder_plan(config: Mapping[str, Any], **options: Any) -> EncoderPlan:
    """Returns the plan of the encoder model that config.json describes; imports no MLX.

    `options`: further arguments for the file of a decoder, such as the `answers` of text_decoders.
    Raises ModelLoadFailed for an unknown model_type, a missing key or an unusable value.
    """
    model_type = config.get("model_type")
    files = {**ENCODERS, **DECODERS}
    if not isinstance(model_type, str) or model_type not in files:
        raise ModelLoadFailed(
            f"config.json has model_type {model_type!r}, which is not supported as an encoder"
            f" model; supported are: {', '.join(SUPPORTED)}"
        )
    return cast(EncoderPlan, import_module(files[model_type]).encoder_plan(config, **options))
