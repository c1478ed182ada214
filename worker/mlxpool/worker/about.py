"""What a sound model is, in the words of `mlxpool models` and `mlxpool check`. No MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlxpool.worker import rules
from mlxpool.worker.chat import Template
from mlxpool.worker.folder import ModelFolder, read_json
from mlxpool.worker.models.counting import CountingEngine
from mlxpool.worker.needs import NAMES, main_dtype

FEATURES = ("batching", "tree", "resume", "deterministic")  # of every architecture in models/
COUNTING_FEATURES = ("batching", "resume", "deterministic")  # it keeps no keys and values


def about(folder: ModelFolder) -> dict[str, Any]:
    """See docs/models.md, `model`; the values are those of JSON."""
    tokenizer = read_json(folder.path / "tokenizer.json")
    return {
        "type": folder.model_type,
        "size": folder.weight_bytes,
        "parameters": sum(math.prod(shape) for shape in folder.plan.shapes.values()),
        "layers": folder.plan.layers,
        "context": folder.context,
        "vocabulary": folder.plan.vocab_size,
        "quantisation": quantisation(folder),
        "tokenizer": tokenizer_kind(tokenizer),
        "templates": ["default"] if Template.from_folder(folder.path).source else [],
        "eos_ids": sorted(folder.eos_ids),
        "digest": rules.digest_of(folder.digest),
        "features": list(FEATURES),
    }


def about_counting(engine: CountingEngine) -> dict[str, Any]:
    """The same of the built-in model that counts; it has no files."""
    return {
        "type": "counting",
        "size": 0,
        "parameters": 0,
        "layers": 0,
        "context": engine.context,
        "vocabulary": engine.vocab_size,
        "quantisation": None,
        "tokenizer": "bytes",
        "templates": [],
        "eos_ids": [],
        "digest": engine.digest,
        "features": list(COUNTING_FEATURES),
    }


def quantisation(folder: ModelFolder) -> str:
    """Such as `4-bit affine g64`, or for plain weights what most of them are: `bf16`."""
    settings = folder.config.get("quantization") or folder.config.get("quantization_config")
    if not isinstance(settings, Mapping) or "bits" not in settings:
        return NAMES[main_dtype(folder.tensors.values())]
    mode = settings.get("mode", "affine")
    words = f"{settings['bits']}-bit {mode} g{settings.get('group_size')}"
    others = any(isinstance(value, Mapping) for value in settings.values())
    return f"{words}, some layers otherwise" if others else words


def tokenizer_kind(tokenizer: Mapping[str, Any]) -> str:
    """The algorithm that tokenizer.json names, and how it sees bytes."""
    model = tokenizer.get("model")
    settings: Mapping[str, Any] = model if isinstance(model, Mapping) else {}
    kind = str(settings.get("type") or "BPE")
    if "ByteLevel" in _types(tokenizer.get("decoder")):
        return f"{kind}, byte-level"
    return f"{kind}, byte fallback" if settings.get("byte_fallback") else kind


def _types(part: Any) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(part, Mapping):
        return set()
    inner = part.get("decoders")
    found = {str(part.get("type"))}
    for one in inner if isinstance(inner, list) else []:
        found |= _types(one)
    return found
