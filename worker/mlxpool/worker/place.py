"""From a model's settings to the files they mean: the one place that knows what `path` may be."""

from __future__ import annotations

from pathlib import Path

from mlxpool.common.catalogue import way_out
from mlxpool.common.config import ModelConfig
from mlxpool.common.errors import ModelLoadFailed

BUILTIN = "builtin:"
COUNTING = f"{BUILTIN}counting"
DEMO = f"{BUILTIN}demo"
DEMO_FOLDER = Path(__file__).parent / "demo"


def place_of(config: ModelConfig) -> Path:
    """The folder of a model's files, which need not exist.

    Raises ModelLoadFailed for a built-in model that is none, and for one out of the models folder
    whose files a link takes from elsewhere.
    """
    if config.path == DEMO:
        return DEMO_FOLDER
    if config.path.startswith(BUILTIN):
        raise ModelLoadFailed(f"there is no {config.path!r}; built in are {DEMO} and {COUNTING}")
    path = Path(config.path)
    if config.within:
        _refuse_way_out(path, Path(config.within))
    return path


def _refuse_way_out(path: Path, border: Path) -> None:
    outside = way_out(path, border)
    if outside is not None:
        raise ModelLoadFailed(
            f"a link in {path} leads out of the models folder, to {outside}; if it is meant to,"
            " name the model in the config: [models.NAME] with its path"
        )
