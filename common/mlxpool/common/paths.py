"""Where a pool lives on this machine. Light: every command imports it."""

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
