"""Models in the Hugging Face cache, by repository name. Nothing is downloaded.

The cache has a folder for each repository: refs/main holds the name of a revision, and
snapshots/REVISION its files, which are links into blobs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.paths import expanded

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{7,64}")


def is_repository_name(path: str) -> bool:
    """Whether `path` has the form of a repository name: org/name."""
    return _NAME.fullmatch(path) is not None


def cache_folder() -> Path:
    """The folder of Hugging Face's downloads, by its tools' environment variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return expanded(os.environ[variable])
    home = os.environ.get("HF_HOME")
    if not home:
        home = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return expanded(home) / "hub"


def snapshot(name: str) -> Path:
    """The snapshot folder of the repository `name`, org/name.

    Raises ModelLoadFailed where it is missing, incomplete, or a link in it leads outside.
    """
    repository = cache_folder() / f"models--{name.replace('/', '--')}"
    if not repository.is_dir():
        raise ModelLoadFailed(
            f"{name!r} is neither a folder here nor in the Hugging Face cache (looked for "
            f"{repository}): download it with `hf download {name}`, or set HF_HOME to the cache "
            "that has it"
        )
    folder = repository / "snapshots" / _revision(name, repository)
    if not folder.is_dir():
        raise ModelLoadFailed(f"{folder} does not exist: {_again(name)}")
    for file in sorted(folder.rglob("*")):
        _require_inside(name, repository, file)
    return folder


def _again(name: str) -> str:
    return f"the download is not complete, repeat `hf download {name}`"


def _revision(name: str, repository: Path) -> str:
    """The revision in refs/main, else the only snapshot."""
    file = repository / "refs" / "main"
    if file.is_file():
        revision = file.read_text(encoding="utf-8", errors="replace").strip()
        if not _REVISION.fullmatch(revision):
            raise ModelLoadFailed(f"{file} holds {revision!r}, must be a revision: {_again(name)}")
        return revision
    found = sorted(path.name for path in (repository / "snapshots").glob("*"))
    if len(found) != 1:
        raise ModelLoadFailed(
            f"{repository} has no refs/main and {len(found)} snapshots: {_again(name)}"
        )
    return found[0]


def _require_inside(name: str, repository: Path, file: Path) -> None:
    target = file.resolve()
    if not target.is_relative_to(repository.resolve()):
        raise ModelLoadFailed(f"{file} is a link to {target}, which is not of {name!r}: refused")
    if not target.exists():
        raise ModelLoadFailed(f"{file} is a link to {target}, which is missing: {_again(name)}")
