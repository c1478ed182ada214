"""Checks the files of a model without MLX: config, tensors, special tokens, digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.layers import quantisation
from mlxpool.worker.layers.derived_weights import MODULE_TENSORS, TensorSpec
from mlxpool.worker.layers.model_plan import ModelPlan, VisionPlan
from mlxpool.worker.layers.quantisation import QuantConfig, byte_columns_bytes
from mlxpool.worker.media.settings import ImageSettings
from mlxpool.worker.weights import mlx_lm_models
from mlxpool.worker.weights.chat_template_files import JINJA_FOLDER, named_files
from mlxpool.worker.weights.files import (
    SAFETENSORS,
    ModelFiles,
    ShardContent,
    merge_tensors,
)
from mlxpool.worker.weights.json_files import (
    FileLookup,
    is_present,
    optional_json,
    read_file,
    read_json,
    require_size,
)
from mlxpool.worker.weights.locate import open_files
from mlxpool.worker.weights.match import WeightMatch, match_weights
from mlxpool.worker.weights.safetensors_header import Tensor
from mlxpool.worker.weights.special_tokens import SpecialTokens

_SAMPLE_BYTES = 2**20  # bytes at each end of a shard that the digest covers
FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PACKED_BYTES = {"U32": 4, "U8": 1}
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_DIGESTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    PREPROCESSOR,
    PROCESSOR,
)


class Vision(Struct, frozen=True):
    """The plan and the settings of a checked model's image encoder."""

    plan: VisionPlan
    settings: ImageSettings


class ModelFolder(Struct, frozen=True):
    """A model whose files have been checked and agree with each other."""

    path: Path  # shown in errors
    files: ModelFiles
    config: Mapping[str, Any]
    model_type: str
    context: int  # tokens
    plan: ModelPlan
    match: WeightMatch
    weight_bytes: int  # bytes of the tensors that the model uses, as stored
    eos_ids: frozenset[int]
    bos_token: str | None
    add_bos: bool | None  # None: the key is not in tokenizer_config.json
    digest: str  # hex digest of config, tokenizer, template and weights, which decide the text
    uses_mlx_lm: bool = False  # computed by mlx-lm's code, see mlx_lm_models.py
    vision: Vision | None = None  # None: the model takes text only
    stamps: tuple[tuple[str, int, int], ...] = ()  # stamps of the shards before the check read them
    notes: tuple[str, ...] = ()  # notes on contradictions between files and on other files

    @property
    def shards(self) -> tuple[Path, ...]:
        return self.files.shards

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The stored tensors that the model uses, with the model's names, in the order of use."""
        return self.match.tensors


def inspect(
    model: Path | ModelFiles,
    engine: str = "auto",
    *,
    encoder: ModelPlan | None = None,
    predicts: bool = False,
) -> ModelFolder:
    """Checks a model, given by its files or its folder; reads headers, but no weights.

    `engine`: our code or mlx-lm's, see ModelConfig. `encoder`: the plan of an encoder model.
    `predicts`: use the checkpoint's multi-token prediction head, if there is one. Raises
    ModelLoadFailed with the file, the tensor or the value, and the remedy.
    """
    files = open_files(model)
    config = read_json(files / "config.json")
    supported = encoder is not None or config.get("model_type") in models.SUPPORTED
    uses_mlx_lm = encoder is None and _uses_mlx_lm(config, supported, engine)
    plan = encoder or (mlx_lm_models.plan(config) if uses_mlx_lm else models.plan(config))
    require_tokenizer(files.where, files)
    special = SpecialTokens.read(files, config)
    stamps, contents = files.stamps(), files.contents()
    tensors = merge_tensors(contents)
    vision = find_vision(files, plan, tensors)
    if vision is not None:
        plan = vision.plan.whole
    if predicts and plan.prediction is not None and any(map(plan.prediction.is_part, tensors)):
        plan = plan.prediction.whole(set(tensors))
    if uses_mlx_lm:
        matched = mlx_lm_models.match_all(files, tensors)
    else:
        matched = match_weights(plan, tensors, quant_config_of(files, config, contents.values()))
    return ModelFolder(
        path=files.where,
        files=files,
        config=config,
        model_type=str(config["model_type"]),
        context=plan.context,
        plan=plan,
        match=matched,
        weight_bytes=sum(tensor.nbytes for tensor in matched.tensors.values()),
        eos_ids=special.eos_ids,
        bos_token=special.bos_token,
        add_bos=special.add_bos,
        digest=_digest(files, contents, forced=uses_mlx_lm and supported),
        uses_mlx_lm=uses_mlx_lm,
        vision=vision,
        stamps=stamps,
        notes=files.notes if encoder else (*files.notes, *special.notes),
    )


def find_vision(files: FileLookup, plan: ModelPlan, tensors: Iterable[str]) -> Vision | None:
    """Returns the model's image encoder; None if the checkpoint lacks the encoder or its settings.

    Text-only conversions lack both. Raises ModelLoadFailed for unusable settings.
    """
    if plan.vision is None or not any(map(plan.vision.is_part, tensors)):
        return None
    settings = _preprocessor(files)
    return None if settings is None else Vision(plan.vision, plan.vision.settings(settings))


def _preprocessor(files: FileLookup) -> Mapping[str, Any] | None:
    """Returns the image encoder's settings; None if the folder has none.

    They are in preprocessor_config.json or, in newer folders, in processor_config.json.
    """
    if is_present(files / PREPROCESSOR):
        return read_json(files / PREPROCESSOR)
    inner = optional_json(files / PROCESSOR).get("image_processor")
    return inner if isinstance(inner, Mapping) else None


def require_tokenizer(where: Path, files: FileLookup) -> None:
    """Raises ModelLoadFailed if tokenizer.json is missing or too large; the error shows `where`."""
    if not is_present(files / "tokenizer.json"):
        raise ModelLoadFailed(f"{where} has no tokenizer.json, the only tokenizer format supported")
    require_size(files / "tokenizer.json")


def quant_config_of(
    files: ModelFiles, config: Mapping[str, Any], contents: Iterable[ShardContent]
) -> QuantConfig:
    """Returns the quantisation of a model's weights.

    It is in config.json or, for a model in Ollama's store or a GGUF file, in the weight files.
    """
    if not files.digests and files.format is SAFETENSORS:
        return quantisation.parse_quant_config(config)
    named = {module: layout for content in contents for module, layout in content.layouts.items()}
    return QuantConfig(named=named, infer=True)


def _uses_mlx_lm(config: Mapping[str, Any], supported: bool, engine: str) -> bool:
    """Returns whether mlx-lm's code computes the model.

    Raises ModelLoadFailed if `engine` requires mlx-lm, but mlx-lm is not available for this model.
    """
    available = mlx_lm_models.is_available(config)
    if engine == "mlx-lm" and not available:
        raise ModelLoadFailed(
            f'engine = "mlx-lm", but mlx-lm has no model_type {config.get("model_type")!r} here:'
            " install it (`pip install 'mlxpool[zoo]'`) or leave engine out"
        )
    return engine == "mlx-lm" or (engine == "auto" and not supported and available)


def digest_now(folder: ModelFolder) -> str:
    """Returns the digest of a checked model's files as they are now. Raises ModelLoadFailed."""
    forced = folder.uses_mlx_lm and folder.model_type in models.SUPPORTED
    return _digest(folder.files, folder.files.contents(), forced=forced)


def _digest(files: ModelFiles, contents: Mapping[Path, ShardContent], *, forced: bool) -> str:
    """Returns a digest of a model's small files and of its weight files.

    The digest covers the header of each weight file and, if a file has no stored digest, the size
    and both ends of the file. `forced`: mlx-lm's code computes a model that our code could compute,
    too; the last bits of the results then differ.
    """
    digest = hashlib.sha256(b"mlx-lm" if forced else b"")
    templates = (f"{JINJA_FOLDER}/{file.name}" for file in named_files(files))
    for name in (*_DIGESTED, *templates):
        if (files / name).is_file():
            _add(digest, name, read_file(files / name))
    for shard, content in contents.items():
        _add(digest, shard.name, content.raw)
        if shard not in files.digests:
            _add(digest, str(shard.stat().st_size), _ends(shard))
    return digest.hexdigest()


def _ends(file: Path) -> bytes:
    with file.open("rb") as stream:
        first = stream.read(_SAMPLE_BYTES)
        stream.seek(max(file.stat().st_size - _SAMPLE_BYTES, 0))
        return first + stream.read(_SAMPLE_BYTES)


def _add(digest: Any, label: str, content: bytes) -> None:
    digest.update(f"{label}:{len(content)}:".encode())
    digest.update(content)


def dequantised_growth(folder: ModelFolder, width: int, *, deterministic: bool = False) -> int:
    """Returns by how many bytes weights grow if dequantised to numbers of `width` bytes.

    Unless `deterministic`, includes the copies of weights for products of one row, see
    byte_columns.py.
    """
    growth = sum(_module_growth(folder, module, width) for module in folder.match.layouts)
    return growth if deterministic else growth + _byte_columns_bytes(folder)


def _byte_columns_bytes(folder: ModelFolder) -> int:
    shapes, layouts = folder.plan.shapes, folder.match.layouts.items()
    return sum(byte_columns_bytes(layout, shapes[f"{module}.weight"]) for module, layout in layouts)


def _module_growth(folder: ModelFolder, module: str, width: int) -> int:
    specs = folder.match.weights
    names = (f"{module}.{kind}" for kind in MODULE_TENSORS if kind != "bias")
    packed = sum(_spec_bytes(specs[name], width) for name in names if name in specs)
    return math.prod(folder.plan.shapes[f"{module}.weight"]) * width - packed


def _spec_bytes(spec: TensorSpec, width: int) -> int:
    item = width if spec.dtype in FLOAT_BYTES else PACKED_BYTES[spec.dtype]
    return math.prod(spec.shape) * item
