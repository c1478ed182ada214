"""The paths of a pool and of its settings. Cheap to import, because every command imports it."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Returns the user's home folder; "/" for a user id without one, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expanded(path: str | Path) -> Path:
    """Returns a path whose leading ~ is replaced by the home folder.

    ~NAME is not replaced if the user NAME is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        first, *rest = Path(path).parts
        return home().joinpath(*rest) if first == "~" else Path(path)


def default_run_dir() -> Path:
    """Returns $MLXPOOL_RUN_DIR, else $XDG_RUNTIME_DIR/mlxpool, else ~/.mlxpool/run."""
    named = os.environ.get("MLXPOOL_RUN_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "mlxpool"
    return home() / ".mlxpool" / "run"


def default_prefix_dir() -> Path:
    """Returns the folder in which workers store the KV caches of prompt prefixes."""
    return _cache_dir() / "prefixes"


def default_gguf_dir() -> Path:
    """Returns the folder of the files that are converted from the metadata of GGUF files."""
    return _cache_dir() / "gguf"


def default_blas_dir() -> Path:
    """Returns the folder of OpenBLAS copies with renamed symbols."""
    return _cache_dir() / "openblas"


def _cache_dir() -> Path:
    """Returns the folder of the user's caches of mlxpool.

    It is $CACHE_DIRECTORY, which systemd sets, else $XDG_CACHE_HOME/mlxpool, else ~/.cache/mlxpool.
    """
    named = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "mlxpool"


def default_state_dir(run_dir: Path) -> Path:
    """Returns the folder of the jobs of a pool: jobs/NAME in the user's folder of mlxpool's state.

    The folder of state is $STATE_DIRECTORY, which systemd sets, else $XDG_STATE_HOME/mlxpool, else
    ~/.local/state/mlxpool. NAME is made from the path of the run directory, so each pool of a user
    has its own folder: `run-user-1000-mlxpool` for /run/user/1000/mlxpool. In NAME a "-" of the
    path is "_-", and a "_" is "__".
    """
    named = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    states = os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state"
    state = Path(named) if named else Path(states) / "mlxpool"
    place = os.path.realpath(run_dir).strip("/")
    return state / "jobs" / place.replace("_", "__").replace("-", "_-").replace("/", "-")


def default_config_files() -> tuple[Path, ...]:
    """Returns the default files of settings: the user's, then the machine's."""
    configs = os.environ.get("XDG_CONFIG_HOME") or home() / ".config"
    return Path(configs) / "mlxpool" / "mlxpool.toml", Path("/etc/mlxpool/mlxpool.toml")


def config_file(flag: Path | None = None) -> Path | None:
    """Returns the settings file: of the flag, of $MLXPOOL_CONFIG, or the first existing default.

    A named file is returned even if it does not exist: reading it raises the error.
    """
    named = flag or os.environ.get("MLXPOOL_CONFIG")
    if named:
        return Path(named)
    # Path.is_file would raise in a home folder that this user may not read.
    return next((file for file in default_config_files() if os.path.isfile(file)), None)


def run_dir_of(flag: Path | None = None) -> Path:
    """Returns the run directory from the flag, the environment, the settings, or the default."""
    if flag or os.environ.get("MLXPOOL_RUN_DIR"):
        return flag or default_run_dir()
    file = config_file()
    if file is None or not os.access(file, os.R_OK):
        return default_run_dir()
    import tomllib  # imported here: only commands with a settings file need it

    try:
        named = tomllib.loads(file.read_text("utf-8")).get("pool", {}).get("run_dir")
    except (OSError, ValueError, AttributeError):
        return default_run_dir()  # `mlxpool config check` reports the error
    return expanded(named) if isinstance(named, str) else default_run_dir()


def file_stem(slot: str) -> str:
    """Returns a distinct file name for each slot, also if names have slashes: org%2Fm-0."""
    name, _, number = slot.rpartition("/")
    return f"{name.replace('%', '%25').replace('/', '%2F')}-{number}"


def worker_log(run_dir: Path, slot: str) -> Path:
    """Returns the file to which the workers of a slot log."""
    return run_dir / "logs" / f"{file_stem(slot)}.log"


def log_slot(log: Path) -> str:
    """Returns the slot of a worker's log, from the name of the file."""
    name, _, number = log.stem.rpartition("-")
    return f"{name.replace('%2F', '/').replace('%25', '%')}/{number}"
