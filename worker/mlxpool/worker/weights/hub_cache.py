"""Models in the Hugging Face cache, by repository name. Nothing is downloaded here.

`mlxpool pull` and other programs fill the cache. The cache has a folder for each repository:
refs/main has the name of a revision, and snapshots/REVISION has its files. The files are links to
the repository's blobs. A blob may be a link to a blob that all repositories of a cache share.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.paths import expanded
from mlxpool.worker.weights.other_formats import PYTORCH

PREFIX = "hf:"
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{7,64}")
_WEIGHTS = (".safetensors", ".gguf", *PYTORCH)


class HubModel(Struct, frozen=True):
    """A model of the hub.

    `repository`: ORG/NAME. `file`: the GGUF file to use; "": the whole repository.
    """

    repository: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repository}:{self.file}" if self.file else self.repository


def parse(text: str) -> HubModel:
    """Parses [hf:]ORG/NAME[:FILE.gguf]; raises ModelLoadFailed for other texts."""
    repository, colon, file = text.removeprefix(PREFIX).partition(":")
    parts = file.split("/")
    named = file.endswith(".gguf") and not {"", ".", ".."}.intersection(parts)
    if not is_repository_name(repository) or (colon and not named):
        raise ModelLoadFailed(
            f"{text!r} is no model of the hub: write ORG/NAME, or ORG/NAME:FILE.gguf for one file"
            " of several"
        )
    return HubModel(repository, file)


def is_repository_name(path: str) -> bool:
    """Returns whether `path` has the form of a repository name: org/name."""
    return _NAME.fullmatch(path) is not None


def cache_folder() -> Path:
    """Returns the cache folder of Hugging Face's tools, by their environment variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return expanded(os.environ[variable])
    home = os.environ.get("HF_HOME")
    if not home:
        home = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return expanded(home) / "hub"


def repository_folder(repository: str) -> Path:
    """Returns the folder of a repository in the cache, whether it exists or not."""
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def find(model: HubModel) -> Path:
    """Returns the snapshot folder of a model's repository, or the GGUF file in the snapshot.

    Raises ModelLoadFailed if the snapshot is missing or incomplete, or if a link leads out of the
    cache.
    """
    repository = repository_folder(model.repository)
    if not repository.is_dir():
        raise ModelLoadFailed(
            f"{model.repository!r} is not in the Hugging Face cache (looked for {repository}): get"
            f" it with `mlxpool pull {model}`, or set HF_HOME to the cache that has it; if a folder"
            " is meant, it does not exist"
        )
    folder = repository / "snapshots" / _revision(model, repository)
    if not folder.is_dir():
        raise ModelLoadFailed(f"{folder} does not exist: {_again(model)}")
    files = sorted(folder.rglob("*"))
    for file in files:
        _require_inside(model, repository, file)
    if model.file and not (folder / model.file).is_file():
        raise ModelLoadFailed(
            f"the Hugging Face cache has {model.repository!r} without the file {model.file}: get it"
            f" with `mlxpool pull {model}`"
        )
    if not any(file.suffix in _WEIGHTS for file in files):
        raise ModelLoadFailed(f"{folder} has no weights: {_again(model)}")
    return folder / model.file


def _again(model: HubModel) -> str:
    return f"the download is not complete, repeat `mlxpool pull {model}`"


def _revision(model: HubModel, repository: Path) -> str:
    """Returns the revision in refs/main, else the only snapshot."""
    file = repository / "refs" / "main"
    if file.is_file():
        revision = file.read_text(encoding="utf-8", errors="replace").strip()
        if not _REVISION.fullmatch(revision):
            raise ModelLoadFailed(f"{file} holds {revision!r}, must be a revision: {_again(model)}")
        return revision
    revisions = sorted(path.name for path in (repository / "snapshots").glob("*"))
    if len(revisions) != 1:
        raise ModelLoadFailed(
            f"{repository} has no refs/main and {len(revisions)} snapshots: {_again(model)}"
        )
    return revisions[0]


def _require_inside(model: HubModel, repository: Path, file: Path) -> None:
    target = file.resolve()
    shared = repository.parent / "blobs"
    if not any(target.is_relative_to(border.resolve()) for border in (repository, shared)):
        raise ModelLoadFailed(
            f"{file} is a link to {target}, which is not of {model.repository!r}: refused"
        )
    if not target.exists():
        raise ModelLoadFailed(f"{file} is a link to {target}, which is missing: {_again(model)}")
