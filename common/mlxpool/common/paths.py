"""Where a pool and its settings live on this machine. Light: every command imports it."""

from __future__ import annotations

import os
from pathlib import Path


def default_run_dir() -> Path:
    """$MLXPOOL_RUN_DIR, else $XDG_RUNTIME_DIR/mlxpool, else ~/.mlxpool/run."""
    named = os.environ.get("MLXPOOL_RUN_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "mlxpool"
    return Path.home() / ".mlxpool" / "run"


def config_places() -> tuple[Path, ...]:
    """Where the settings are looked for when nobody names a file: the user's, the machine's."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "mlxpool" / "mlxpool.toml", Path("/etc/mlxpool/mlxpool.toml")


def config_file(flag: Path | None = None) -> Path | None:
    """The one file of settings: the flag's, $MLXPOOL_CONFIG's, or the first place that has one.

    Only the first is read. What is named must be there; whoever reads it says so.
    """
    named = flag or os.environ.get("MLXPOOL_CONFIG")
    if named:
        return Path(named)
    return next((place for place in config_places() if place.is_file()), None)


def run_dir_of(flag: Path | None = None) -> Path:
    """Where a command finds the broker: by flag, environment, file, then the default."""
    if flag or os.environ.get("MLXPOOL_RUN_DIR"):
        return flag or default_run_dir()
    file = config_file()
    if file is None or not os.access(file, os.R_OK):
        return default_run_dir()
    import tomllib  # only who has a file pays for it

    try:
        named = tomllib.loads(file.read_text("utf-8")).get("pool", {}).get("run_dir")
    except (OSError, ValueError, AttributeError):
        return default_run_dir()  # `mlxpool config check` says what is wrong with it
    return Path(named).expanduser() if isinstance(named, str) else default_run_dir()
