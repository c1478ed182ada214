"""Selects the files of a hub repository that a model needs. No MLX, no I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.chat_template_files import JINJA_FOLDER
from mlxpool.worker.weights.files import listing
from mlxpool.worker.weights.gguf.model import GGUF_SUFFIX, PROJECTOR, split_names
from mlxpool.worker.weights.hub_cache import HubModel
from mlxpool.worker.weights.other_formats import PYTORCH

_SHARD = re.compile(r"model[^/]*\.safetensors")
_BESIDE = re.compile(  # settings, tokenizer, templates, the steps of sentence-transformers
    r"(?!pytorch_model)[^/]+\.(json|jinja|txt|model)"
    r"|(LICEN[CS]E|README)(\.[^/]+)?"
    rf"|{JINJA_FOLDER}/[^/]+\.jinja"
    r"|\d+_[^/]+/(config\.json|model\.safetensors)"
)


def needed_files(model: HubModel, names: Collection[str], indexed: Collection[str]) -> list[str]:
    """Returns the files that a model needs; `names` are all files of the repository.

    `indexed`: the shards in the repository's index; empty without an index. Weights in other
    formats and other GGUF models are omitted. Raises ModelLoadFailed if the repository has no
    weights in a supported format, lacks a shard, or has several GGUF models of which `model` names
    none.
    """
    if model.file:
        return _parts(model, model.file, names)
    shards = _shards(names, indexed)
    if "config.json" in names and shards:
        _require(model, shards, names)
        return sorted({*shards, *filter(_BESIDE.fullmatch, names)})
    models = gguf_models(names)
    if len(models) > 1:
        raise ModelLoadFailed(
            f"{model} has {len(models)} GGUF models, name one as {model}:FILE: {', '.join(models)}"
        )
    if not models:
        raise ModelLoadFailed(f"{model} has {_instead(names)}")
    return _parts(model, models[0], names)


def gguf_models(names: Iterable[str]) -> list[str]:
    """Returns the first file of each GGUF model among `names`, without image encoders."""
    files = [name for name in names if name.endswith(GGUF_SUFFIX)]
    return sorted(
        {split_names(name)[0] for name in files if not _plain(name).startswith(PROJECTOR)}
    )


def _plain(name: str) -> str:
    return name.rpartition("/")[2]


def _parts(model: HubModel, file: str, names: Collection[str]) -> list[str]:
    if file not in names:
        others = ", ".join(gguf_models(names)) or "none"
        raise ModelLoadFailed(
            f"{model.repository} has no file {file}; its GGUF models are: {others}"
        )
    parts = split_names(file)
    _require(model, parts, names)
    return list(parts)


def _shards(names: Collection[str], indexed: Collection[str]) -> Collection[str]:
    """Returns the shards of the weights, chosen as by `files.find_shards` in a folder."""
    shards = indexed or [name for name in names if _SHARD.fullmatch(name)]
    return ("model.safetensors",) if not indexed and "model.safetensors" in shards else shards


def _require(model: HubModel, needed: Iterable[str], names: Collection[str]) -> None:
    if lacking := sorted(set(needed).difference(names)):
        raise ModelLoadFailed(f"{model.repository} lacks {listing('file', lacking)} of its weights")


def _instead(names: Iterable[str]) -> str:
    if any(name.endswith(PYTORCH) for name in names):
        return "weights of PyTorch alone, which are not read: look for a repository of safetensors"
    return "neither a config.json with safetensors nor GGUF files"
