"""Describes a checked model for `mlxpool models` and `mlxpool check`. No MLX."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mlxpool.common.checks import is_integer
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.protocol.images import VISION
from mlxpool.worker import versions
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.encoders.folder import EncoderFolder
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.layers import quantisation as quant
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.prompt.chat_template.output_format import chat_format
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.scheduling.memory_estimate import DTYPE_NAMES, main_dtype
from mlxpool.worker.weights import card, mlx_lm_models
from mlxpool.worker.weights.chat_template_files import DEFAULT
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.json_files import read_json

if TYPE_CHECKING:
    from mlxpool.worker.prompt.chat_template.sandbox import Template

FEATURES = ("batching", "tree", "resume", "format")  # the features of every architecture in models/
CONFIG_NUMBERS = {  # detail -> key of config.json
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
MAX_SHOWN_TEMPLATE = 128 * 2**10  # bytes
SCALES = ".scales"  # suffix of a tensor that every quantised module has
NOT_ON_A_GPU = (
    "deterministic = true is built for the CPU alone, on a GPU the bits of a product depend on how"
    " many lines it has; leave it out"
)
COUNTING_FEATURES = ("batching", "resume", "deterministic")  # no "tree": without a KV cache


def describe(folder: ModelFolder, prefix_cache: str = "tree", kv: str = AUTO) -> dict[str, Any]:
    """Returns the `model` object of docs/models.md, of JSON values, with these settings."""
    tokenizer = read_json(folder.files / "tokenizer.json")
    templates = ChatTemplates.from_folder(folder.files).templates
    return {
        **of_weights(folder),
        "tokenizer": tokenizer_kind(tokenizer),
        "templates": sorted(templates),
        "chat": chat_format(template.source for template in templates.values()),
        "eos_ids": sorted(folder.eos_ids),
        "digest": versions.digest_of(folder.digest, kv),
        "features": [
            feature for feature in features(folder) if feature != "tree" or prefix_cache == "tree"
        ],
        "details": details(folder, templates),
    }


def of_weights(folder: ModelFolder) -> dict[str, Any]:
    """Returns the part of the description that needs no tokenizer."""
    return {
        "type": folder.model_type,
        "size": folder.weight_bytes,
        "parameters": None if folder.uses_mlx_lm else _parameters(folder),
        "layers": None if folder.uses_mlx_lm else folder.plan.layers or len(folder.plan.caches),
        "context": folder.context,
        "vocabulary": folder.plan.vocab_size,
        "quantisation": quantisation(folder),
    }


def details(folder: ModelFolder, templates: Mapping[str, Template]) -> dict[str, Any]:
    """Returns further properties of a model; None for each property that its files lack.

    The properties are the modification time of config.json (seconds since 1970), numbers of the
    config, the chat template, the licence (a text or a name), and the options that
    generation_config.json recommends.
    """
    inner = folder.config.get("text_config")
    config = inner if isinstance(inner, Mapping) else folder.config
    numbers = {name: config.get(key) for name, key in CONFIG_NUMBERS.items()}
    template = templates.get(DEFAULT) or next(iter(templates.values()), None)
    return {
        "modified": int((folder.files / "config.json").stat().st_mtime),
        **{name: number if is_integer(number) else None for name, number in numbers.items()},
        "template": None if template is None else _shown(template.source),
        "license": card.licence(folder.files),
        "sampling": card.sampling(folder.files),
    }


def _shown(source: str) -> str | None:
    """Returns the template if it fits into a message; else None."""
    size = len(source.encode("utf-8", "replace"))
    return source if size <= MAX_SHOWN_TEMPLATE else None


def _parameters(folder: ModelFolder) -> int:
    return sum(math.prod(shape) for shape in folder.plan.shapes.values())


def features(folder: ModelFolder) -> tuple[str, ...]:
    """Returns the features that the model supports.

    Possible features are batching, prefix tree, resume, formats of answers, `deterministic` and
    images.
    """
    if folder.uses_mlx_lm:
        return mlx_lm_models.FEATURES
    if folder.vision is not None:
        return (*FEATURES, VISION)
    plain = all(
        isinstance(cache, KeyValueSpec) and not cache.window for cache in folder.plan.caches
    )
    return (*FEATURES, "deterministic") if plain else FEATURES


def require_deterministic(folder: ModelFolder, *, on_gpu: bool = False) -> None:
    """Raises ModelLoadFailed if the model does not support the setting `deterministic`."""
    if "deterministic" in features(folder):
        if on_gpu:
            raise ModelLoadFailed(NOT_ON_A_GPU)
        return
    why = "which is computed by mlx-lm's code"
    if not folder.uses_mlx_lm:
        why = "whose layers keep windows or states"
        if folder.vision is not None:
            why = "which reads images"
    raise ModelLoadFailed(
        f"deterministic = true is not built for model_type {folder.model_type!r}, {why};"
        " leave it out"
    )


def describe_counting(engine: CountingEngine) -> dict[str, Any]:
    """Returns the description of the built-in counting model, which needs no files."""
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
        "chat": {"tools": None, "thinking": None},
        "eos_ids": [],
        "digest": engine.digest,
        "features": list(COUNTING_FEATURES),
        "details": {
            **dict.fromkeys(("modified", *CONFIG_NUMBERS, "template", "license")),
            "sampling": {},
        },
    }


def quantisation(folder: ModelFolder) -> str:
    """Returns the most frequent layout of quantised weights, for example `4-bit affine g64`.

    The text ends with "mixed" if some layers have another layout. For a model with dense weights,
    returns their most frequent dtype.
    """
    layouts = Counter(_layouts(folder)).most_common()
    if not layouts:
        return DTYPE_NAMES[main_dtype(folder.tensors.values())]
    layout, _ = layouts[0]
    text = f"{layout.bits}-bit {layout.mode} g{layout.group_size}"
    return f"{text}, mixed" if len(layouts) > 1 else text


def _layouts(folder: ModelFolder) -> Iterable[QuantLayout]:
    """Returns the layouts of all quantised modules.

    If mlx-lm computes the model, these are the modules with scales.
    """
    if not folder.uses_mlx_lm:
        return folder.match.layouts.values()
    try:
        config = quant.parse_quant_config(folder.config)
    except ModelLoadFailed:  # a layout that mlx-lm may know
        return ()
    modules = (name[: -len(SCALES)] for name in folder.tensors if name.endswith(SCALES))
    return [layout for module in modules if (layout := config.named.get(module, config.default))]


def tokenizer_kind(tokenizer: Mapping[str, Any]) -> str:
    """Returns the algorithm that tokenizer.json names, and its representation of bytes."""
    model = tokenizer.get("model")
    settings: Mapping[str, Any] = model if isinstance(model, Mapping) else {}
    kind = str(settings.get("type") or "BPE")
    if "ByteLevel" in _types(tokenizer.get("decoder")):
        return f"{kind}, byte-level"
    return f"{kind}, byte fallback" if settings.get("byte_fallback") else kind


def _types(part: Any) -> set[str]:
    """Returns the types of a tokenizer's decoder and of the decoders nested in it."""
    if not isinstance(part, Mapping):
        return set()
    inner = part.get("decoders")
    types = {str(part.get("type"))}
    for decoder in inner if isinstance(inner, list) else []:
        types |= _types(decoder)
    return types


def describe_encoder(encoder: EncoderFolder, tokenizer: str) -> dict[str, Any]:
    """Returns the `model` object of docs/models.md, of JSON values.

    `tokenizer`: the type of the tokenizer. The object has the keys of a model that generates text,
    and three more: the `dimensions` of its vectors (0: the model does not embed), the names of its
    `prompts`, and its `labels`. Its only feature is its task.
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
