"""What the files of a model tell without being read: their location, size and changes."""

from __future__ import annotations

from pathlib import Path

from mlxpool.common.config.model_names import outside_target
from mlxpool.common.config.schema import BUILTIN_PREFIX, ModelConfig, PoolConfig

WHOLE = "model.safetensors", "model.safetensors.index.json"  # all weights; which shards have them
# Files beside a model that it is not made of: hidden ones, those of its makers, adapters.
NO_WEIGHTS = (".", "consolidated", "adapter")
Fingerprints = tuple[tuple[str, int, int], ...]  # name, time and size of each file


def weights_bytes(model: ModelConfig) -> int:
    """Bytes of the model's weights on the disk, and of its draft model's; 0 where they cannot be
    seen.
    """
    if not _has_files(model.path):
        return model.counting.load_bytes
    size = _stored_bytes(model.path)
    drafting = size and model.draft and _has_files(model.draft)
    return size + (_stored_bytes(model.draft) if drafting else 0)


def _has_files(path: str) -> bool:
    return not path.startswith(BUILTIN_PREFIX) and Path(path).exists()


def _stored_bytes(path: str) -> int:
    """The bytes of a folder's safetensors, else of its GGUF files, or of a file."""
    place = Path(path)
    try:
        if place.is_file():
            return place.stat().st_size
        single, index = (place / name for name in WHOLE)
        if single.is_file() and not index.is_file():
            return single.stat().st_size
        files = [one for one in place.glob("*.safetensors") if not one.name.startswith(NO_WEIGHTS)]
        return sum(file.stat().st_size for file in files or place.glob("*.gguf"))
    except OSError:  # a broken link; the worker reports it
        return 0


def all_weights_bytes(config: PoolConfig) -> dict[str, int]:
    """The least memory of one worker of each model, in bytes, as far as the disk tells."""
    return {name: weights_bytes(model) for name, model in config.models.items()}


def location(model: ModelConfig) -> str:
    """The folder that all links lead to, or the reference; "" if nothing may share its worker.

    That is a model without files, and one that is refused for a link out of the models folder.
    """
    if model.path == f"{BUILTIN_PREFIX}counting" or (
        model.within and outside_target(Path(model.path), Path(model.within)) is not None
    ):
        return ""
    try:
        return str(Path(model.path).resolve()) if Path(model.path).exists() else model.path
    except (OSError, RuntimeError):
        return model.path


def all_locations(config: PoolConfig) -> dict[str, str]:
    """The location of each model: names with the same one may share workers."""
    return {name: location(model) for name, model in config.models.items()}


def fingerprints(path: Path) -> Fingerprints:
    """Names, times and sizes of the files at `path`; () where nothing can be seen."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return ()
    return tuple(found for file in files if (found := _fingerprint(file)) is not None)


def _fingerprint(file: Path) -> tuple[str, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return file.name, status.st_mtime_ns, status.st_size
