"""Models without a file in models/: mlx-lm's code computes these if the extra `zoo` is installed.

This module finds out, before the load, whether mlx-lm supports a model, and the model's context and
vocabulary. Imports neither MLX nor mlx-lm.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.caches.kinds import CacheKind, FullCache, StateCache
from mlxpool.worker.layers.config_fields import integer
from mlxpool.worker.layers.derived_weights import TensorSpec
from mlxpool.worker.layers.layer_types import LayerBuilder
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.weights.files import ModelFiles
from mlxpool.worker.weights.match import WeightMatch
from mlxpool.worker.weights.safetensors_header import Tensor

CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
UNBOUNDED_CONTEXT = 2**20  # tokens if config.json has none of these keys, as in recurrent models
FEATURES = ("resume",)  # features of every model of mlx-lm, known before the load
CACHE_MODULE = "mlx_lm.models.cache"
# mlx-lm's caches that can be copied. A KVCache grows by tokens; all other caches are valid only for
# exactly the tokens that made them.
CACHE_KINDS: Mapping[str, Callable[[int], CacheKind]] = {
    "KVCache": FullCache,
    "RotatingKVCache": StateCache,
    "ArraysCache": StateCache,
}
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def is_available(config: Mapping[str, Any]) -> bool:
    """Returns whether mlx-lm is installed and has a file for this model_type."""
    model_type, home = config.get("model_type"), _home()
    if home is None or not isinstance(model_type, str) or not _NAME.fullmatch(model_type):
        return False
    name = _renamed(home).get(model_type, model_type)
    return (home / "models" / f"{name}.py").is_file()


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns a plan with only context and vocabulary.

    Only mlx-lm knows the caches and tensors of the model.

    Raises ModelLoadFailed with the missing or unusable key.
    """
    text = config.get("text_config")
    settings = {**config, **text} if isinstance(text, Mapping) else config
    keys = (key for key in CONTEXT_KEYS if settings.get(key) is not None)
    key = next(keys, None)
    return ModelPlan(
        context=UNBOUNDED_CONTEXT if key is None else integer(settings, key),
        vocab_size=integer(settings, "vocab_size"),
        caches=(),
        shapes={},
        ignored=lambda name: True,
        build=_built_by_mlx_lm,
    )


def match_all(files: ModelFiles, tensors: Mapping[str, Tensor]) -> WeightMatch:
    """Returns a WeightMatch of all stored tensors.

    Only mlx-lm knows which of the tensors it needs.

    Raises ModelLoadFailed unless the files are in a folder.
    """
    if files.named:
        raise ModelLoadFailed(
            f"{files.where} is no folder: a model_type that only mlx-lm has is read from a folder "
            "in Hugging Face's layout"
        )
    weights = {name: TensorSpec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return WeightMatch(weights=weights, tensors=dict(tensors), derived=(), layouts={})


def cache_kinds_of(classes: Iterable[str]) -> tuple[CacheKind, ...] | None:
    """Returns the CACHE_KINDS entry of each cache's class; None if a cache cannot be copied."""
    kinds = []
    for layer, name in enumerate(classes):
        home, _, short = name.rpartition(".")
        if home != CACHE_MODULE or short not in CACHE_KINDS:
            return None
        kinds.append(CACHE_KINDS[short](layer))
    return tuple(kinds)


def _built_by_mlx_lm(builder: LayerBuilder) -> NoReturn:
    raise NotImplementedError("such a model is loaded by mlx_lm/engine.py")


@cache
def _home() -> Path | None:
    """Returns the folder of mlx-lm's package, without an import; None if not installed."""
    spec = find_spec("mlx_lm")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


@cache
def _renamed(home: Path) -> Mapping[str, str]:
    """Returns, by model_type, the model_type whose file mlx-lm uses; reads mlx-lm's source."""
    utils = home / "utils.py"
    tree = ast.parse(utils.read_text(encoding="utf-8")) if utils.is_file() else ast.Module([], [])
    return dict(_entries(tree))


def _entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            yield from ast.literal_eval(node.value).items()
