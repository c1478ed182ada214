"""Finds files that downloads and other systems leave beside a model.

Unfinished downloads are errors; some other files are reported as notes. All other files beside the
model are never read, such as other formats (*.bin, original/, *.gguf beside safetensors) and hidden
files (.DS_Store, ._NAME of macOS).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.json_files import require_file

# Endings of the names of incomplete files, as curl, browsers, hf and aria2 write them.
UNFINISHED = (
    ".incomplete", ".part", ".partial", ".filepart", ".crdownload", ".download", ".tmp", ".temp",
    ".aria2", ".aria2__temp", ".st", ".!qb", ".opdownload",
)  # fmt: skip
CONTROL = (".aria2", ".st")  # endings of a file beside a full-size file with missing parts
HUB_DOWNLOADS = ".cache/huggingface/download"  # folder that `hf download --local-dir` writes
ADAPTER = "adapter_config.json"
MAX_LISTED = 3


def require_finished(files: Iterable[Path]) -> None:
    """Raises ModelLoadFailed for a dangling link, and for a file with an unfinished download.

    An unfinished file can have its full size, as with aria2.
    """
    for file in files:
        require_file(file)
        for suffix in CONTROL:
            if (control := file.with_name(file.name + suffix)).exists():
                raise ModelLoadFailed(
                    f"{file} is not complete: {control.name} beside it says that its download was"
                    " not finished; repeat the download, or remove the file that is not needed"
                )


def unfinished(folder: Path) -> list[str]:
    """Returns the names of a folder's files whose download is not finished."""
    names = [file.name for file in _files(folder) if file.suffix.lower() in UNFINISHED]
    inside = folder / HUB_DOWNLOADS
    return sorted([*names, *(f"{HUB_DOWNLOADS}/{file.name}" for file in _incomplete(inside))])


def notes_of(folder: Path, shards: Iterable[Path]) -> list[str]:
    """Returns notes about a folder's files that the model does not use."""
    notes = []
    if names := unfinished(folder):
        notes.append(f"a download was not finished, or goes on: {_listed(names)}")
    used = {shard.name for shard in shards}
    others = sorted(
        file.name
        for file in _files(folder)
        if file.suffix == ".safetensors" and not file.name.startswith(".") and file.name not in used
    )
    if adapters := [name for name in others if name.startswith("adapter")]:
        notes.append(
            f"{_listed(adapters)}: an adapter (LoRA) is not applied; fuse it into the weights"
        )
    if rest := [name for name in others if name not in adapters]:
        notes.append(f"weights that are not read, for the model has others: {_listed(rest)}")
    return notes


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _incomplete(folder: Path) -> list[Path]:
    return [file for file in _files(folder) if file.suffix == ".incomplete"]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
