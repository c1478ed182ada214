"""The paths of a pool and of its settings. Cheap to import, because every command does so."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The user's home folder; "/" for a user id that has none, as containers may run with."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def expanded(path: str | Path) -> Path:
    """A path whose leading ~ is the home folder; ~NAME of an unknown user stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        first, *rest = Path(path).parts
        return home().joinpath(*rest) if first == "~" else Path(path)


def default_run_dir() -> Path:
    """$MLXPOOL_RUN_DIR, else $XDG_RUNTIME_DIR/mlxpool, else ~/.mlxpool/run."""
    named = os.environ.get("MLXPOOL_RUN_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "mlxpool"
    return home() / ".mlxpool" / "run"


def default_prefix_dir() -> Path:
    """The folder of cached prefixes."""
    return _cache_dir() / "prefixes"


def default_gguf_dir() -> Path:
    """The folder of what is made of the metadata of GGUF files."""
    return _cache_dir() / "gguf"


def default_blas_dir() -> Path:
    """The folder of the BLAS that is made of a package's."""
    return _cache_dir() / "openblas"


def _cache_dir() -> Path:
    """mlxpool's folder of caches of the user.

    $CACHE_DIRECTORY, which systemd sets, else $XDG_CACHE_HOME/mlxpool, else ~/.cache/mlxpool.
    """
    given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "mlxpool"


def default_state_dir(run_dir: Path) -> Path:
    """The folder of the jobs of a pool: jobs/NAME in mlxpool's folder of the user's state.

    That is $STATE_DIRECTORY, which systemd sets, else $XDG_STATE_HOME/mlxpool, else
    ~/.local/state/mlxpool. NAME is the path of the run directory, so each pool of a user has its
    own: `run-user-1000-mlxpool` for /run/user/1000/mlxpool. In names "-" is "_-", and "_" is "__".
    """
    given = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    states = os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state"
    state = Path(given) if given else Path(states) / "mlxpool"
    place = os.path.realpath(run_dir).strip("/")
    return state / "jobs" / place.replace("_", "__").replace("-", "_-").replace("/", "-")


def default_config_files() -> tuple[Path, ...]:
    """The files that are looked for when none is named: the user's, then the machine's."""
    configs = os.environ.get("XDG_CONFIG_HOME") or home() / ".config"
    return Path(configs) / "mlxpool" / "mlxpool.toml", Path("/etc/mlxpool/mlxpool.toml")


def config_file(flag: Path | None = None) -> Path | None:
    """The file of settings: that of the flag, of $MLXPOOL_CONFIG, or the first default file found.

    A file that is named is returned even if it does not exist: reading it raises the error.
    """
    named = flag or os.environ.get("MLXPOOL_CONFIG")
    if named:
        return Path(named)
    # Not Path.is_file, which raises in a home folder that is closed to this user.
    return next((file for file in default_config_files() if os.path.isfile(file)), None)


def run_dir_of(flag: Path | None = None) -> Path:
    """The broker's run directory: from the flag, the environment, the settings, or the default."""
    if flag or os.environ.get("MLXPOOL_RUN_DIR"):
        return flag or default_run_dir()
    file = config_file()
    if file is None or not os.access(file, os.R_OK):
        return default_run_dir()
    import tomllib  # only commands with a settings file need it

    try:
        named = tomllib.loads(file.read_text("utf-8")).get("pool", {}).get("run_dir")
    except (OSError, ValueError, AttributeError):
        return default_run_dir()  # `mlxpool config check` reports the error
    return expanded(named) if isinstance(named, str) else default_run_dir()


def file_stem(slot: str) -> str:
    """A distinct file name for each slot, also where names have slashes: org/m/0 -> org%2Fm-0."""
    name, _, number = slot.rpartition("/")
    return f"{name.replace('%', '%25').replace('/', '%2F')}-{number}"


def worker_log(run_dir: Path, slot: str) -> Path:
    """The file to which the workers of a slot log."""
    return run_dir / "logs" / f"{file_stem(slot)}.log"


def log_slot(log: Path) -> str:
    """The slot of a worker's log."""
    name, _, number = log.stem.rpartition("-")
    return f"{name.replace('%2F', '/').replace('%25', '%')}/{number}"
