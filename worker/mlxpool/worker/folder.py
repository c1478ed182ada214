"""A model folder, checked in full before MLX is touched: config, tensors, tokens, digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import foreign, models
from mlxpool.worker.chat import token_names
from mlxpool.worker.headers import Tensor, read_header
from mlxpool.worker.models.base import Plan

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
    require_folder(path)
    config = read_json(path / "config.json")
    plan = models.plan(config)
    refuse_quantised(path, config)
    require_tokenizer(path)
    settings = _optional_json(path / "tokenizer_config.json")
    shards = shards_of(path)
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
        eos_ids=_eos_ids(path, config, settings),
        bos_token=token_names(settings).get("bos_token"),
        add_bos=_add_bos(settings),
        digest=_digest(path, {shard: raw for shard, (raw, _) in headers.items()}),
    )


def require_folder(path: Path) -> None:
    """Raises ModelLoadFailed saying what is there instead of a model's folder."""
    if not path.exists():
        raise ModelLoadFailed(f"{path} does not exist")
    if path.is_file():
        foreign.refuse_file(path)
    if not (path / "config.json").is_file():
        foreign.refuse_folder(path)


def require_tokenizer(path: Path) -> None:
    """Raises ModelLoadFailed for a folder without one."""
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadFailed(f"{path} has no tokenizer.json, the only tokenizer format supported")


def read_json(file: Path) -> dict[str, Any]:
    """The map that a JSON file holds; raises ModelLoadFailed naming the file."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadFailed(f"{file} holds a {type(value).__name__}, must be a map")
    return value


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def refuse_quantised(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelLoadFailed for weights that are not read."""
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            raise ModelLoadFailed(
                f"{path / 'config.json'} has {key!r}: quantised weights are not read by this "
                "version; name the folder of the unquantised model"
            )


def shards_of(path: Path) -> tuple[Path, ...]:
    """The weights' files; raises ModelLoadFailed naming those that are missing."""
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
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelLoadFailed(
            f"{index} names {_listed('shard', missing)}, which"
            f" {'are' if len(missing) > 1 else 'is'} missing; download again"
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
    found = list(headers)
    for fault in tensor_faults(plan, (tensors for _, tensors in found)):
        raise ModelLoadFailed(fault)
    tensors = {name: tensor for _, tensors in found for name, tensor in tensors.items()}
    return {name: tensors[name] for name in plan.shapes}


def tensor_faults(plan: Plan, shards: Iterable[Mapping[str, Tensor]]) -> Iterator[str]:
    """Everything in which the tensors of the shards are not those that the plan asks for."""
    found: dict[str, Tensor] = {}
    for name, tensor in (item for tensors in shards for item in tensors.items()):
        if name in found:
            yield f"tensor {name!r} is in both {found[name].file} and {tensor.file}"
        found.setdefault(name, tensor)
    missing = [name for name in plan.shapes if name not in found]
    if missing:
        yield f"the weights lack {_listed('tensor', missing)}, which config.json asks for"
    surplus = [name for name in found if name not in plan.shapes and not plan.ignored(name)]
    if surplus:
        file, names = found[surplus[0]].file, _listed("tensor", surplus)
        yield f"{file} has {names}, unknown to the model that config.json describes"
    for name, shape in plan.shapes.items():
        if name in found:
            yield from _tensor_faults(found[name], shape)


def _listed(kind: str, names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the {kind}{'s' if len(names) > 1 else ''} {shown}{more}"


def _tensor_faults(tensor: Tensor, shape: tuple[int, ...]) -> Iterator[str]:
    where = f"{tensor.file}: tensor {tensor.name!r}"
    if tensor.shape != shape:
        yield f"{where} has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
    if tensor.dtype not in _DTYPES:
        yield f"{where} has dtype {tensor.dtype}, must be one of {', '.join(_DTYPES)}"


def _eos_ids(path: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> frozenset[int]:
    """The first of generation_config.json, config.json and tokenizer_config.json that tells."""
    for source in (_optional_json(path / "generation_config.json"), config):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token) is int for token in ids):
            return frozenset(ids)
    text = token_names(settings).get("eos_token")
    return _token_ids(read_json(path / "tokenizer.json"), text) if text else frozenset()


def _token_ids(tokenizer: Mapping[str, Any], text: str) -> frozenset[int]:
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == text:
            return frozenset({int(added["id"])})
    vocab = (tokenizer.get("model") or {}).get("vocab")
    known = vocab.get(text) if isinstance(vocab, dict) else None
    return frozenset() if known is None else frozenset({int(known)})


def _add_bos(settings: Mapping[str, Any]) -> bool | None:
    value = settings.get("add_bos_token")
    return value if isinstance(value, bool) else None


def _digest(path: Path, headers: Mapping[Path, bytes]) -> str:
    """The whole of the small files; header, size and both ends of each shard."""
    digest = hashlib.sha256()
    for name in _DIGESTED:
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
