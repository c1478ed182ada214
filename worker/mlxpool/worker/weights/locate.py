"""Finds the files for a model's setting `path`. Only this module knows the forms of `path`."""

from __future__ import annotations

from pathlib import Path

from mlxpool.common.config.model_names import outside_target
from mlxpool.common.config.schema import BUILTIN_PREFIX, ModelConfig
from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights import hub_cache, ollama_store
from mlxpool.worker.weights.files import ModelFiles, folder_files
from mlxpool.worker.weights.gguf.model import find_gguf, open_gguf

COUNTING = f"{BUILTIN_PREFIX}counting"
DEMO = f"{BUILTIN_PREFIX}demo"
DEMO_CHAT = f"{BUILTIN_PREFIX}demo-chat"
DEMO_EMBED = f"{BUILTIN_PREFIX}demo-embed"
DEMO_FOLDER = Path(__file__).parents[1] / "demo"
FOLDERS = {
    DEMO: DEMO_FOLDER,
    DEMO_CHAT: DEMO_FOLDER.with_name("demo_chat"),
    DEMO_EMBED: DEMO_FOLDER.with_name("demo_embed"),
}


def locate(config: ModelConfig) -> Path | ModelFiles:
    """Returns the location of a model: a folder, which need not exist, or the model's files.

    `path` is a folder, a GGUF file, a folder with a GGUF file, `ollama:NAME`, or a model of the
    Hugging Face cache: `hf:ORG/NAME`, `hf:ORG/NAME:FILE.gguf` or, if no such folder exists,
    `ORG/NAME`. Raises ModelLoadFailed for a missing model, for an unreadable GGUF file, and for a
    link that leads out of the models folder.
    """
    if config.path in FOLDERS:
        return FOLDERS[config.path]
    if config.path.startswith(BUILTIN_PREFIX):
        names = ", ".join((*FOLDERS, COUNTING))
        raise ModelLoadFailed(f"there is no {config.path!r}; built in are {names}")
    if config.path.startswith(ollama_store.PREFIX):
        return ollama_store.open_model(config.path.removeprefix(ollama_store.PREFIX))
    path = Path(config.path)
    if config.within:
        _refuse_way_out(path, Path(config.within))
    if _is_of_hub(config.path):
        path = hub_cache.find(hub_cache.parse(config.path))
    gguf = find_gguf(path)
    return open_gguf(gguf) if gguf else path


def places(config: ModelConfig) -> list[Path]:
    """Returns the possible paths of a model in a store; empty for any other `path`."""
    try:
        if config.path.startswith(ollama_store.PREFIX):
            return ollama_store.places(config.path.removeprefix(ollama_store.PREFIX))
        if _is_of_hub(config.path):
            return [hub_cache.repository_folder(hub_cache.parse(config.path).repository)]
    except ModelLoadFailed:  # not a valid name
        pass
    return []


def _is_of_hub(path: str) -> bool:
    named = hub_cache.is_repository_name(path) and not Path(path).exists()
    return named or path.startswith(hub_cache.PREFIX)


def open_files(location: Path | ModelFiles) -> ModelFiles:
    """Returns the files at a location; raises ModelLoadFailed if the files are not a model."""
    if isinstance(location, ModelFiles):
        return location
    gguf = find_gguf(location)
    return open_gguf(gguf) if gguf else folder_files(location)


def find_files(path: str) -> ModelFiles:
    """Returns the files for a setting `path`; raises the errors of `locate` and `open_files`."""
    return open_files(locate(ModelConfig(path=path)))


def _refuse_way_out(path: Path, models_folder: Path) -> None:
    outside = outside_target(path, models_folder)
    if outside is not None:
        raise ModelLoadFailed(
            f"a link in {path} leads out of the models folder, to {outside}; if it is meant to,"
            " name the model in the config: [models.NAME] with its path"
        )
