"""A model folder, checked in full before MLX is touched: config, tensors, tokens, digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import foreign, models
from mlxpool.worker.headers import Tensor, read_header
from mlxpool.worker.json_files import read_json
from mlxpool.worker.models.base import Plan
from mlxpool.worker.special_tokens import SpecialTokens

_DTYPES = ("F32", "F16", "BF16")
_SAMPLE = 2**20  # bytes at each end of a shard that the digest reads
_SHOWN = 3  # names in an error that could list thousands
_DIGESTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates/*.jinja"  # digested too


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder whose files agree with each other."""

    path: Path
    config: Mapping[str, Any]
    model_type: str
    context: int  # tokens
    plan: Plan
    shards: tuple[Path, ...]
    tensors: Mapping[str, Tensor]  # those that the model uses, in the order of use
    weight_bytes: int  # of these, as stored
    eos_ids: frozenset[int]
    bos_token: str | None
    add_bos: bool | None  # None: tokenizer_config.json does not say
    digest: str  # hex; of what decides text: config, tokenizer, template, weights


def inspect(path: Path) -> ModelFolder:
    """The folder at `path`; imports no MLX and reads headers, not weights.

    Raises ModelLoadFailed naming the file, the tensor or the value, and what to do.
    """
    _require_folder(path)
    config = read_json(path / "config.json")
    plan = models.plan(config)
    _refuse_quantised(path, config)
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadFailed(f"{path} has no tokenizer.json, the only tokenizer format supported")
    special = SpecialTokens.read(path, config)
    shards = _shards(path)
    headers = {shard: read_header(shard) for shard in shards}
    tensors = _matched(plan, headers.values())
    return ModelFolder(
        path=path,
        config=config,
        model_type=str(config["model_type"]),
        context=plan.context,
        plan=plan,
        shards=shards,
        tensors=tensors,
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        eos_ids=special.eos_ids,
        bos_token=special.bos_token,
        add_bos=special.add_bos,
        digest=_digest(path, {shard: raw for shard, (raw, _) in headers.items()}),
    )


def _require_folder(path: Path) -> None:
    if not path.exists():
        raise ModelLoadFailed(f"{path} does not exist")
    if path.is_file():
        foreign.refuse_file(path)
    if not (path / "config.json").is_file():
        foreign.refuse_folder(path)


def _refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise ModelLoadFailed(
                f"{path / 'config.json'} has {key!r}: quantised weights are not read by this "
                "version; name the folder of the unquantised model"
            )


def _shards(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    shards = tuple(sorted(path.glob("model*.safetensors")))
    if not shards:
        _refuse_weightless(path)
    return shards


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadFailed(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadFailed(f"{index} names the shard {name!r}, must be a plain file name")
        if not (index.parent / name).is_file():
            raise ModelLoadFailed(
                f"{index} names the shard {name!r}, which is missing; download it again"
            )
    return tuple(index.parent / name for name in names)


def _refuse_weightless(path: Path) -> None:
    if any(path.glob("*.gguf")):
        foreign.refuse_folder(path)
    others = [*path.glob("*.bin"), *path.glob("*.pth")]
    also = "; it has PyTorch files, which are not read: convert them" if others else ""
    raise ModelLoadFailed(f"{path} has no model*.safetensors{also}")


def _matched(
    plan: Plan, headers: Iterable[tuple[bytes, Mapping[str, Tensor]]]
) -> dict[str, Tensor]:
    """The tensors that the plan asks for, in its order, after every name and shape is checked."""
    found: dict[str, Tensor] = {}
    for _, tensors in headers:
        for name, tensor in tensors.items():
            if name in found:
                raise ModelLoadFailed(
                    f"tensor {name!r} is in both {found[name].file} and {tensor.file}"
                )
            found[name] = tensor
    _compare_names(plan, found)
    for name, shape in plan.shapes.items():
        _compare(found[name], shape)
    return {name: found[name] for name in plan.shapes}


def _compare_names(plan: Plan, found: Mapping[str, Tensor]) -> None:
    missing = [name for name in plan.shapes if name not in found]
    if missing:
        raise ModelLoadFailed(f"the weights lack {_listed(missing)}, which config.json asks for")
    surplus = [name for name in found if name not in plan.shapes and not plan.ignored(name)]
    if surplus:
        raise ModelLoadFailed(
            f"{found[surplus[0]].file} has {_listed(surplus)}, unknown to the model that "
            "config.json describes"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _compare(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelLoadFailed(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, "
            f"config.json asks for {list(shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise ModelLoadFailed(
            f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}, "
            f"must be one of {', '.join(_DTYPES)}"
        )


def _digest(path: Path, headers: Mapping[Path, bytes]) -> str:
    """The whole of the small files; header, size and both ends of each shard."""
    digest = hashlib.sha256()
    templates = sorted(f"{file.parent.name}/{file.name}" for file in path.glob(_TEMPLATES))
    for name in (*_DIGESTED, *templates):
        if (path / name).is_file():
            _add(digest, name, (path / name).read_bytes())
    for shard, header in headers.items():
        _add(digest, shard.name, header)
        _add(digest, str(shard.stat().st_size), _ends(shard))
    return digest.hexdigest()


def _ends(file: Path) -> bytes:
    with file.open("rb") as stream:
        first = stream.read(_SAMPLE)
        stream.seek(max(file.stat().st_size - _SAMPLE, 0))
        return first + stream.read(_SAMPLE)


def _add(digest: Any, label: str, content: bytes) -> None:
    digest.update(f"{label}:{len(content)}:".encode())
    digest.update(content)
