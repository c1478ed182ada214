"""Downloads a model of the hub into the Hugging Face cache, through huggingface_hub.

huggingface_hub provides the progress bars, the token (HF_TOKEN, or the token of `hf auth login`)
and the layout of the cache. If two processes download the same file, one of them waits. After a
broken connection huggingface_hub resumes the download. Complete files stay in the cache when a
download fails.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxpool.cli.formatting import size
from mlxpool.cli.style import StatusLine
from mlxpool.common.errors import BadRequest, ModelLoadFailed
from mlxpool.common.version import VERSION
from mlxpool.worker.weights import hub_cache
from mlxpool.worker.weights.files import INDEX, sha256
from mlxpool.worker.weights.hub_cache import HubModel
from mlxpool.worker.weights.hub_files import needed_files
from mlxpool.worker.weights.json_files import read_json

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Download(Struct, frozen=True):
    """A model in the cache.

    `model` is its name in settings; `size` is the number of bytes of its files.
    """

    model: HubModel
    path: Path
    files: int
    size: int


def download(model: HubModel) -> Download:
    """Downloads the files that the cache lacks, and checks the hashes of all files of the model.

    The cache's reference to the newest revision changes last, so that a pool serves the older
    revision until then. Raises BadRequest if huggingface_hub is not installed, and ModelLoadFailed
    if the download fails.
    """
    api = _api()
    cache = hub_cache.cache_folder()
    with _explained(model, api.endpoint, cache):
        info = api.model_info(model.repository, files_metadata=True)
        known = {entry.rfilename: entry for entry in info.siblings or ()}

        def fetch(name: str) -> Path:
            return Path(
                api.hf_hub_download(model.repository, name, revision=info.sha, cache_dir=cache)
            )

        indexed = _indexed(fetch(INDEX)) if INDEX in known and not model.file else set()
        names = needed_files(model, known.keys(), indexed)
        total = sum(known[name].size or 0 for name in names)
        snapshot = hub_cache.repository_folder(model.repository) / "snapshots" / info.sha
        lacking = [name for name in names if not (snapshot / name).exists()]
        _require_room(cache, sum(known[name].size or 0 for name in lacking))
        files = {name: fetch(name) for name in names}
        _verify(files, known)
        _set_newest(hub_cache.repository_folder(model.repository), info.sha)
    if names[0].endswith(".gguf"):
        return Download(HubModel(model.repository, names[0]), files[names[0]], len(names), total)
    return Download(model, snapshot, len(names), total)


def _api() -> Any:
    """Returns the client of the hub at HF_ENDPOINT, else at huggingface.co."""
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise BadRequest(
            "`mlxpool pull` needs huggingface_hub, which is not installed here: pip install"
            " 'mlxpool[hub]'"
        ) from None
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    return HfApi(endpoint=endpoint, library_name="mlxpool", library_version=VERSION)


def _indexed(index: Path) -> set[str]:
    """Returns the file names of the shards in an index."""
    weight_map = read_json(index).get("weight_map")
    return set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()


def _require_room(cache: Path, needed: int) -> None:
    """Raises ModelLoadFailed if the disk of the cache has fewer than `needed` free bytes."""
    place = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ModelLoadFailed(
            f"{size(needed)} are to be downloaded, and {cache} has room for {size(free)}: make"
            " room, or name another folder in HF_HUB_CACHE"
        )


def _verify(files: Mapping[str, Path], known: Mapping[str, Any]) -> None:
    """Compares the hash of each file with the hash in the hub.

    If they differ, deletes the file and raises ModelLoadFailed.
    """
    line = StatusLine()
    for name, file in files.items():
        line.show(f"checking {name}")
        if _hash_of(file, lfs=known[name].lfs is not None) != _hash_in_hub(known[name]):
            line.clear()
            file.resolve().unlink()
            file.unlink()
            raise ModelLoadFailed(
                f"{name} has another hash than in the hub, and was removed: repeat the command; if"
                " it fails again, HF_ENDPOINT or a proxy changes the files"
            )
    line.clear()


def _hash_of(file: Path, *, lfs: bool) -> str:
    """Returns a file's hash in hex: SHA-256 for a large file (LFS), else git's SHA-1 of a blob."""
    if lfs:
        return sha256(file)
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _hash_in_hub(entry: Any) -> str | None:
    digest: str | None = entry.lfs.sha256 if entry.lfs is not None else entry.blob_id
    return digest


def _set_newest(repository: Path, revision: str) -> None:
    """Sets the newest revision (refs/main) of a repository in the cache, atomically for readers."""
    file = repository / "refs" / "main"
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_name(f".main.{os.getpid()}")
    temporary.write_text(revision, "ascii")
    temporary.replace(file)


@contextmanager
def _explained(model: HubModel, endpoint: str, cache: Path) -> Iterator[None]:
    """Raises the errors of a download as ModelLoadFailed, with a remedy in one line."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        yield
    except (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx2.HTTPError,
    ) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise ModelLoadFailed(_words(cause or error, model.repository, endpoint)) from None
    except OSError as error:
        if error.errno in NO_SPACE:
            raise ModelLoadFailed(
                f"no room is left in {cache} ({error.strerror}): make room, or name another folder"
                " in HF_HUB_CACHE"
            ) from None
        if error.errno is None:  # an error of huggingface_hub, such as a file of a wrong size
            raise ModelLoadFailed(f"{_first_line(error)}: repeat the command") from None
        raise


def _words(error: BaseException, repository: str, endpoint: str) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    where = f"{endpoint}/{repository}"
    if isinstance(error, GatedRepoError):
        return (
            f"{repository} is gated: accept its conditions at {where}, and set HF_TOKEN to a token"
            " of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{endpoint} has no repository {repository}, or shows it to its members alone: correct"
            " the name, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, so {endpoint} is not asked: unset it"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        reason = error.server_message or error.response.reason_phrase
        remedy = {401: "HF_TOKEN is not valid", 403: "the token in HF_TOKEN may not read it"}
        return f"{endpoint} answered {status} ({reason}): {remedy.get(status, 'try again later')}"
    return (
        f"{endpoint} cannot be reached, or cut the connection ({_first_line(error)}): check the"
        " network, HTTPS_PROXY and HF_ENDPOINT, and repeat the command; complete files are kept"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0].rstrip(".: ")
