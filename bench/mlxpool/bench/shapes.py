"""Lists the shapes of known models, for random weights: the needed members of each config.json."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("shapes.toml").read_text("utf-8")
)
