"""Describes a checked encoder model for `mlxpool models` and `mlxpool check`. No MLX."""

from __future__ import annotations

import math
from typing import Any

from mlxpool.worker import versions
from mlxpool.worker.encoders.folder import EncoderFolder
from mlxpool.worker.engine.description import details
from mlxpool.worker.scheduling.memory_estimate import DTYPE_NAMES, main_dtype


def describe_encoder(encoder: EncoderFolder, tokenizer: str) -> dict[str, Any]:
    """The `model` object of docs/models.md, of JSON values; `tokenizer` is its kind.

    Beside the keys of a model that generates text it has `dimensions` of its vectors (0: it does
    not embed), the names of its `prompts`, and its `labels`. Its task is its feature.
    """
    folder = encoder.folder
    return {
        "type": folder.model_type,
        "size": folder.weight_bytes,
        "parameters": sum(math.prod(shape) for shape in folder.plan.shapes.values()),
        "layers": len(folder.plan.caches),
        "context": encoder.source.context,
        "vocabulary": encoder.source.vocab_size,
        "quantisation": DTYPE_NAMES[main_dtype(folder.tensors.values())],
        "tokenizer": tokenizer,
        "templates": [],
        "chat": None,
        "eos_ids": [],
        "digest": versions.digest_of(encoder.digest),
        "features": [encoder.task, "batching"],
        "details": details(folder, {}),
        "dimensions": encoder.dimensions,
        "prompts": sorted(encoder.source.prompts),
        "labels": list(encoder.labels),
    }
